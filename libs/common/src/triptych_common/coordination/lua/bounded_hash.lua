-- What the scripts share that keep a bounded hash: the oldest fields go first, and without new ones all expires.
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock

-- Keep one field, and drop the oldest beyond the bound, `max_dropped` at once.
local function set_bounded(hash, order, field, value, ttl_ms, max_items, max_dropped)
  local function keep()
    if redis.call('HSET', hash, field, value) == 1 then redis.call('RPUSH', order, field) end
  end

  keep()  -- before anything is dropped: a Redis out of memory refuses all of it
  if redis.call('HLEN', hash) ~= redis.call('LLEN', order) then  -- one of the two was deleted: begin anew
    redis.call('DEL', hash, order)
    keep()
  end
  local excess = math.min(redis.call('HLEN', hash) - tonumber(max_items), tonumber(max_dropped))
  if excess > 0 then redis.call('HDEL', hash, unpack(redis.call('LPOP', order, excess))) end

  local t = redis.call('TIME')
  local expires_ms = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000) + tonumber(ttl_ms))
  redis.call('PEXPIREAT', hash, expires_ms)  -- both at the same moment
  redis.call('PEXPIREAT', order, expires_ms)
  return redis.call('HLEN', hash)
end
