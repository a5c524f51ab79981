-- Remove an instance unless a later boot of it has registered meanwhile.
-- KEYS: record instances
-- ARGV: boot_id instance
local value = redis.call('GET', record)
if value and cjson.decode(value)['record']['boot_id'] ~= boot_id then return 0 end
redis.call('DEL', record)
redis.call('ZREM', instances, instance)
return 1
