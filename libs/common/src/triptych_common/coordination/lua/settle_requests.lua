-- Requests of an API key have ended: what they cost more or less than they were charged for, and their places.
-- KEYS: levels places
-- ARGV: now_us num_rates *rest    `rest`: rate, limit, correction, ... of as many rates; then the places
local now, first_place = clock_us(now_us), 3 * num_rates + 1
for i = 1, first_place - 1, 3 do
  local limit = tonumber(rest[i + 1])
  put_level(rest[i], math.max(0, level_of(rest[i], limit, now) + tonumber(rest[i + 2])), limit, now)
end
for i = first_place, #rest do redis.call('HDEL', places, rest[i]) end
