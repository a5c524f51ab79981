-- What the scripts share that keep a bounded hash: the oldest fields go first, and without new ones all expires.
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock

-- Keep one field, and drop the oldest beyond the bound, `max_dropped` at once. Returns how many are left.
local function set_bounded(hash, order, field, value, ttl_ms, is_due, max_items, max_dropped)
  local num_items
  local function is_whole()  -- keep it; false: one of the two keys was deleted, as a renewal of both finds
    num_items = redis.call('HSET', hash, field, value) == 1 and redis.call('RPUSH', order, field)
    local is_checked = num_items and (is_due == '1' or num_items == 1)
    return not is_checked or num_items == redis.call('HLEN', hash)
  end

  if not is_whole() then  -- begin anew
    redis.call('DEL', hash, order)
    is_whole()
  end
  -- Dropped behind the write: a Redis out of memory refuses that before anything is lost.
  num_items = num_items or redis.call('HLEN', hash)
  local excess = math.min(num_items - tonumber(max_items), tonumber(max_dropped))
  local oldest = excess > 0 and redis.call('LPOP', order, excess)
  if oldest then num_items = num_items - redis.call('HDEL', hash, unpack(oldest)) end

  -- Written seldom, for both at the same moment: a write each time would be half of this script's commands.
  if is_due == '1' or num_items == 1 then
    local t = redis.call('TIME')
    local expires_ms = string.format('%.0f', t[1] * 1000 + math.floor(t[2] / 1000) + tonumber(ttl_ms))
    redis.call('PEXPIREAT', hash, expires_ms)
    redis.call('PEXPIREAT', order, expires_ms)
  end
  return num_items
end
