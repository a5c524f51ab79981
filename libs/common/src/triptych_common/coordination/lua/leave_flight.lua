-- Requesters wait no more. 1: the last one left, and the job, which no encoder had, is off the stream.
-- KEYS: flight
-- ARGV: group *fields
for _, field in ipairs(fields) do redis.call('HDEL', flight, field) end
if state == '' or state == 'running' then return 0 end
if #live_requesters() > 0 then
  if state == 'claimed' then try_put('until', 0) end  -- the owner may be the one that left
  return 0
end
local entry = get('entry')
redis.call('DEL', flight)
if state ~= 'queued' then return 0 end
take_off_stream(group, entry)
return 1
