-- The job produces nothing. `encoder` empty: any encoder's.
-- KEYS: flight
-- ARGV: job encoder failure
if get('job') ~= job then return {'gone'} end
if state == 'finished' then return {'superseded'} end
local owner = get('encoder')  -- empty: a Redis out of memory did not note the start
if encoder ~= '' and owner ~= '' and owner ~= encoder then return {'superseded'} end
if end_if_left() then return {'failed'} end
local reply = with_requesters('failed')
if not become('failed', try_put, {'metadata'}, 'failure', failure, 'until', 0) then
  redis.call('DEL', flight)
end
return reply
