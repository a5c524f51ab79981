-- Forget names of instances whose last heartbeat is older than `before`. The scores are the writers' wall
-- clocks, which need not agree: an instance that has a record lives, however old its score is.
-- KEYS: instances
-- ARGV: before record_prefix
for _, name in ipairs(redis.call('ZRANGEBYSCORE', instances, '-inf', before)) do
  if redis.call('EXISTS', record_prefix .. name) == 0 then redis.call('ZREM', instances, name) end
end
