-- Count a request of an API key, if it reaches none of the key's limits: on all of them, or on none.
-- KEYS: levels places    a hash of levels by rate; a hash of the ends of leases (us) by place
-- ARGV: now_us place lease_ms max_places *rates
-- `now_us` '': Redis' clock; `max_places` 0: any number; `rates`: rate, limit, cost, ...
local TOLERANCE = 0.000001  -- of a level: what was rounded
local now, most = clock_us(now_us), tonumber(max_places)

local function is_full()
  local num = redis.call('HLEN', places)
  if num < most or redis.call('HGET', places, place) then return false end
  local all = redis.call('HGETALL', places)
  for i = 1, #all, 2 do  -- those of gateways that are gone
    if tonumber(all[i + 1]) <= now then num = num - redis.call('HDEL', places, all[i]) end
  end
  return num >= most
end

local reached, wait_us, found = '', 0, {}
for i = 1, #rates, 3 do
  local limit, cost = tonumber(rates[i + 1]), tonumber(rates[i + 2])
  local level = level_of(rates[i], limit, now)
  found[#found + 1] = level
  local excess = level + cost - limit
  if excess > TOLERANCE and us_to_leak(excess, limit) > wait_us then
    reached, wait_us = rates[i], us_to_leak(excess, limit)
  end
end
if reached == '' and most > 0 and is_full() then reached = 'concurrent_requests' end

local reply = {reached, string.format('%.0f', wait_us)}
for i, level in ipairs(found) do
  local limit, cost = tonumber(rates[3 * i - 1]), tonumber(rates[3 * i])
  if reached == '' then level = level + cost end
  put_level(rates[3 * i - 2], level, limit, now)
  reply[#reply + 1] = string.format('%.6f', level)
end
if reached == '' and most > 0 then
  redis.call('HSET', places, place, string.format('%.0f', now + lease_ms * 1000))
  redis.call('PEXPIRE', places, lease_ms)
end
return reply
