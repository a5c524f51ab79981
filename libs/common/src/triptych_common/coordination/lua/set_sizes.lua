-- Keep the sizes of one item, and drop the oldest items beyond the bound, `max_dropped` at once.
-- KEYS: sizes order    a hash by mm_hash; a list of its mm_hashes, oldest first
-- ARGV: mm_hash value ttl_ms max_items max_dropped
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock

local function keep()
  if redis.call('HSET', sizes, mm_hash, value) == 1 then redis.call('RPUSH', order, mm_hash) end
end

keep()  -- before anything is dropped: a Redis out of memory refuses all of it
if redis.call('HLEN', sizes) ~= redis.call('LLEN', order) then  -- one of the two was deleted: begin anew
  redis.call('DEL', sizes, order)
  keep()
end
local excess = math.min(redis.call('HLEN', sizes) - tonumber(max_items), tonumber(max_dropped))
if excess > 0 then redis.call('HDEL', sizes, unpack(redis.call('LPOP', order, excess))) end

local t = redis.call('TIME')
local expires_ms = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000) + tonumber(ttl_ms))
redis.call('PEXPIREAT', sizes, expires_ms)  -- both at the same moment
redis.call('PEXPIREAT', order, expires_ms)
return redis.call('HLEN', sizes)
