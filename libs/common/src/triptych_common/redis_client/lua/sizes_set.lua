-- Keep the sizes of one item, and drop the oldest items beyond the bound.
-- KEYS: the hash of sizes by mm_hash, the list of its mm_hashes, oldest first.
-- ARGV: mm_hash, sizes, milliseconds that all of it lasts without a write, most items, most that are dropped at once.
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock
local sizes, order = KEYS[1], KEYS[2]
local max_items, max_dropped = tonumber(ARGV[4]), tonumber(ARGV[5])

local function keep()
  if redis.call('HSET', sizes, ARGV[1], ARGV[2]) == 1 then redis.call('RPUSH', order, ARGV[1]) end
end

keep()  -- before anything is dropped: a Redis out of memory refuses all of it
if redis.call('HLEN', sizes) ~= redis.call('LLEN', order) then  -- somebody deleted one of them: begin anew
  redis.call('DEL', sizes, order)
  keep()
end
local excess = math.min(redis.call('HLEN', sizes) - max_items, max_dropped)
if excess > 0 then redis.call('HDEL', sizes, unpack(redis.call('LPOP', order, excess))) end

local t = redis.call('TIME')
local expires_ms = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000) + tonumber(ARGV[3]))
redis.call('PEXPIREAT', sizes, expires_ms)  -- both at the same moment
redis.call('PEXPIREAT', order, expires_ms)
return redis.call('HLEN', sizes)
