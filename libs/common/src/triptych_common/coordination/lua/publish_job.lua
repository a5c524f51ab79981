-- The owner puts the job of its claim on the stream: once, however often it asks. Returns the entry's id.
-- KEYS: flight its_stream
-- ARGV: job ttl_ms *entry_fields
if get('job') ~= job then return '' end
if state ~= 'claimed' then return get('entry') end
stream = its_stream
local entry = redis.call('XADD', stream, '*', unpack(entry_fields))
keep_jobs_for(ttl_ms)
become('queued', put, {}, 'entry', entry, 'stream', stream)
redis.call('HINCRBY', flight, 'num_sent', 1)
return entry
