-- Requesters wait no more. 1: the last one left, and the job, which no encoder had, is off the stream.
-- KEYS: flight
-- ARGV: group *fields
local is_gone, left, found = {}, {}, {}
for _, field in ipairs(fields) do is_gone[field] = true end
for _, each in ipairs(waits) do
  if is_gone[each[1]] then found[#found + 1] = each[1] else left[#left + 1] = each end
end
waits = left
if state ~= '' and state ~= 'running' and #live_requesters() == 0 then
  redis.call('DEL', flight)
  if state ~= 'queued' then return 0 end
  take_off_stream(group, get('entry'))
  return 1
end
if #found > 0 then redis.call('HDEL', flight, unpack(found)) end
if state == 'claimed' then try_put('until', 0) end  -- the owner may be the one that left
return 0
