-- The item is sealed, and the requesters of `served` were sent all of it. `metadata`, for those that join later,
-- says so; a flight without metadata was lost after these were sent, and its requesters may have missed them.
-- KEYS: flight
-- ARGV: job metadata finished_ms *served
if get('job') ~= job then return {'gone'} end
local sealed = get('metadata') ~= '' and {'metadata', metadata} or {}
local is_served, are_all_served = {}, true
for _, field in ipairs(served) do is_served[field] = true end

for _, each in ipairs(waits) do are_all_served = are_all_served and is_served[each[1]] end
local _, fields = live_requesters(are_all_served)
are_all_served = true
for _, field in ipairs(fields) do are_all_served = are_all_served and is_served[field] end
local reply = with_requesters(are_all_served and 'finished' or 'joined')
if end_if_left() then return reply end
if not are_all_served then
  if #sealed > 0 then try_put(unpack(sealed)) end
  return reply
end
if become('finished', try_put, {}, 'entry', '', 'stream', '', 'encoder', '', unpack(sealed)) then
  redis.call('PEXPIRE', flight, finished_ms)
else
  redis.call('DEL', flight)
end
return reply
