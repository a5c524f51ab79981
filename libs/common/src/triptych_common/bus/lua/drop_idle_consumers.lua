-- Remove the group's consumers that hold nothing and have not read for `idle_ms`. Only those that hold
-- nothing: what a removed consumer held would be delivered to no other. Without a stream or a group XINFO
-- fails: then there is nothing to remove.
-- KEYS: stream
-- ARGV: group idle_ms
local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, group)
if consumers.err then return 0 end
local num_dropped = 0
for _, flat in ipairs(consumers) do
  local info = {}
  for i = 1, #flat, 2 do info[flat[i]] = flat[i + 1] end
  if info['pending'] == 0 and info['idle'] >= tonumber(idle_ms) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, info['name'])
    num_dropped = num_dropped + 1
  end
end
return num_dropped
