-- The item is sealed, and the requesters of `served` were sent all of it.
-- KEYS: flight
-- ARGV: job finished_ms *served
if get('job') ~= job then return {'gone'} end
local is_served, are_all_served, _, fields = {}, true, live_requesters()
for _, field in ipairs(served) do is_served[field] = true end
for _, field in ipairs(fields) do
  if not is_served[field] then are_all_served = false end
end
local reply = with_requesters(are_all_served and 'finished' or 'joined')
if not are_all_served or end_if_left() then return reply end
if become('finished', try_put, {'entry', 'stream', 'encoder'}) then
  redis.call('PEXPIRE', flight, finished_ms)
else
  redis.call('DEL', flight)
end
return reply
