-- The owner puts the job of its claim on the stream: once, however often it asks. Returns the entry's id.
-- KEYS: flight its_stream
-- ARGV: job remaining_ms new_ms *entry_fields    `new_ms`: lifetime of a stream that this entry begins
if get('job') ~= job then return '' end
if state ~= 'claimed' then return get('entry') end
local entry = append(its_stream, remaining_ms, new_ms, entry_fields)
become('queued', put, {}, 'entry', entry, 'stream', stream, 'num_sent', (tonumber(get('num_sent')) or 0) + 1)
return entry
