-- The item's size is known: leave it for requesters that join later.
-- KEYS: flight
-- ARGV: job metadata
if get('job') ~= job then return {'gone'} end
try_put('metadata', metadata)
return with_requesters('known')
