-- A store has an entry no more, in that life of it. The field stays, empty: its turn to go comes by its age.
-- KEYS: entries order    a hash by mm_hash; a list of its mm_hashes, oldest first
-- ARGV: mm_hash store generation

local found = redis.call('HGET', entries, mm_hash)
if not found then return 0 end
local kept, num_removed = {}, 0
for each in string.gmatch(found, '[^\n]+') do
  local its_store, its_generation = string.match(each, '^(%S+) (%S+)')
  if its_store == store and its_generation == generation then
    num_removed = num_removed + 1
  else
    kept[#kept + 1] = each
  end
end
if num_removed > 0 then redis.call('HSET', entries, mm_hash, table.concat(kept, '\n')) end
return num_removed
