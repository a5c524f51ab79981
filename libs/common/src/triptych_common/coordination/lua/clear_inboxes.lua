-- Delete the streams that only one instance reads, unless it has registered again.
-- KEYS: record *inboxes
if redis.call('EXISTS', record) == 1 then return 0 end
return redis.call('UNLINK', unpack(inboxes))
