-- A consumer of another stream takes the oldest entry that no consumer has, unless the consumers that it is
-- meant for are about to: some of them have free slots. What they leave for too long it takes all the same.
-- KEYS: stream
-- ARGV: group consumer max_wait_ms *peers    peers: name, slots, ... of those that it is meant for
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock

local function as_table(flat)
  local found = {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

local length, last_id = redis.call('XLEN', stream), nil
if length == 0 then return {} end
for _, fields in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local info = as_table(fields)
  if info['name'] == group then last_id = info['last-delivered-id'] end
end
if not last_id then return {} end
local oldest = redis.call('XRANGE', stream, '(' .. last_id, '+', 'COUNT', 1)[1]
if not oldest then return {} end

local spare_after_ms = tonumber(as_table(oldest[2])['spare_after_ms'])
if not spare_after_ms then return {} end
local t = redis.call('TIME')
local age_ms = t[1] * 1000 + math.floor(t[2] / 1000) - tonumber(string.match(oldest[1], '%d+'))
if age_ms < spare_after_ms then return {} end
local held, num_held, num_free = {}, 0, 0
for _, fields in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local info = as_table(fields)
  held[info['name']] = info['pending']
  num_held = num_held + info['pending']
end
for i = 1, #peers, 2 do num_free = num_free + math.max(0, peers[i + 1] - (held[peers[i]] or 0)) end
if length - num_held <= num_free and age_ms < spare_after_ms + max_wait_ms then return {} end
local taken = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', 1, 'STREAMS', stream, '>')
return taken and taken[1][2][1] or {}
