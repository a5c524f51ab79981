-- Each key that exists lasts `ttl_ms` from now on, or longer where it did already.
-- KEYS: *keys
-- ARGV: ttl_ms
for _, key in ipairs(keys) do
  local left = redis.call('PTTL', key)
  if left ~= -2 and left < tonumber(ttl_ms) then redis.call('PEXPIRE', key, ttl_ms) end
end
return 1
