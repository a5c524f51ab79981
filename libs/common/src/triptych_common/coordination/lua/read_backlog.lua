-- Of each stream: its jobs, milliseconds that the oldest of those that no encoder took has waited
-- KEYS: *streams
-- ARGV: group
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock
return read_backlogs(streams, group)
