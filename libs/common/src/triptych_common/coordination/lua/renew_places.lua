-- A gateway's requests of an API key go on: their leases begin anew, also where Redis had lost them.
-- KEYS: levels places
-- ARGV: now_us lease_ms *held
local ends_us = string.format('%.0f', clock_us(now_us) + lease_ms * 1000)
for _, place in ipairs(held) do redis.call('HSET', places, place, ends_us) end
redis.call('PEXPIRE', places, lease_ms)
