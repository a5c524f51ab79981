-- The owner puts the job of its claim on the stream: once, however often it asks. Returns the entry's id.
-- KEYS: flight stream
-- ARGV: job ttl_ms *entry_fields
if get('job') ~= job then return '' end
if state ~= 'claimed' then return get('entry') end
local entry = redis.call('XADD', stream, '*', unpack(entry_fields))
keep_jobs_for(ttl_ms)
become('queued', put, {}, 'entry', entry)
redis.call('HINCRBY', flight, 'num_sent', 1)
return entry
