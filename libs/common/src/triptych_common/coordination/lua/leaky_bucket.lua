-- What the scripts of an API key's limits share. Each rate is a leaky bucket, the continuous-state form of the
-- Generic Cell Rate Algorithm (ITU-T I.371, annex A): its level is what was charged and has not leaked out
-- yet, and `limit` leaks out in a minute. A level above the limit is waited for.
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock
local PERIOD_US = 60000000

local function clock_us(given)
  if given ~= '' then return tonumber(given) end
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

local function level_of(rate, limit, now)
  local level, at = string.match(redis.call('HGET', levels, rate) or '0 0', '^(%S+) (%S+)$')
  local leaked = math.max(0, now - tonumber(at)) * limit / PERIOD_US  -- the clock of another Redis may be behind
  return math.max(0, tonumber(level) - leaked)
end

local function us_to_leak(level, limit)
  return math.max(0, level) * PERIOD_US / limit
end

-- Kept until all of it has leaked out.
local function put_level(rate, level, limit, now)
  redis.call('HSET', levels, rate, string.format('%.17g %.0f', level, now))
  local ms = math.ceil(us_to_leak(level, limit) / 1000) + 1000
  if redis.call('PTTL', levels) < ms then redis.call('PEXPIRE', levels, string.format('%.0f', ms)) end
end
