-- An encoder still works on the job.
-- KEYS: flight its_stream
-- ARGV: job entry encoder lease_ms
if get('job') ~= job or state == 'failed' or state == 'finished' then return 0 end
if state == 'running' and get('encoder') ~= encoder then return 0 end
-- Claimed or queued again: Redis lost the flight, and a gateway sent the job once more.
become('running', try_put, {}, 'entry', entry, 'stream', its_stream, 'encoder', encoder, 'until', now_ms() + lease_ms)
live_for(lease_ms)
return 1
