-- What the scripts of a flight share; ALLOWED, the table of `single_flight`, and READS_REQUESTERS are put in front
-- of it: whether the script needs the requesters, of which a flight may have many.
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock

local FIELDS = {'state', 'stream', 'job', 'attempt', 'entry', 'encoder', 'until', 'num_sent', 'metadata', 'failure'}
local known, waits = {}, {}  -- the flight, and its requesters' fields: read once, kept equal by `put` and `drop`

local function note_all(written)
  for i = 1, #written, 2 do
    local field, value = written[i], written[i + 1]
    if string.sub(field, 1, 2) == 'r:' then
      waits[#waits + 1] = {field, value}
    else
      known[field] = type(value) == 'number' and string.format('%.0f', value) or value
    end
  end
  return true
end

local function note(...)
  return note_all({...})
end

if READS_REQUESTERS then
  note_all(redis.call('HGETALL', flight))
else
  for i, value in ipairs(redis.call('HMGET', flight, unpack(FIELDS))) do known[FIELDS[i]] = value or nil end
end

local clock_ms
local function now_ms()
  if not clock_ms then
    local t = redis.call('TIME')
    clock_ms = t[1] * 1000 + math.floor(t[2] / 1000)
  end
  return clock_ms
end

local function get(field)
  return known[field] or ''
end

local function put(...)
  redis.call('HSET', flight, ...)
  return note(...)
end

local function try_put(...)  -- false: a Redis out of memory refuses it, and the caller's work goes on
  local reply = redis.pcall('HSET', flight, ...)
  return not (type(reply) == 'table' and reply.err) and note(...)
end

local function drop(fields)
  local found = {}
  for _, field in ipairs(fields) do
    if known[field] then found[#found + 1] = field end
    known[field] = nil
  end
  if #found > 0 then redis.call('HDEL', flight, unpack(found)) end
end

local state = get('state')  -- '': there is no flight
local stream = get('stream')  -- that its entry is on; '': it has none

-- Nothing else assigns the state. `write`: put or try_put, of the state and the fields that follow;
-- `ended`: fields that the new state has not.
local function become(to, write, ended, ...)
  if not (ALLOWED[state] and ALLOWED[state][to]) then
    error('a flight may not go from "' .. state .. '" to "' .. to .. '"', 0)
  end
  state = to
  drop(ended)
  return write('state', to, ...)
end

local is_new = state == ''

local function live_for(ms)
  if is_new or redis.call('PTTL', flight) < tonumber(ms) then redis.call('PEXPIRE', flight, ms) end
end

local function keep_jobs_for(ms, new_ms)  -- the stream lives as long as a requester waits for a job on it
  if stream == '' then return end
  local left = redis.call('PTTL', stream)
  if left == -1 then ms = math.max(ms, new_ms or 0) end
  if left ~= -2 and left < tonumber(ms) then redis.call('PEXPIRE', stream, string.format('%.0f', ms)) end
end

-- A job goes on a stream; `new_ms`: lifetime of a stream that this entry begins. Returns the entry's id, which
-- has Redis' clock in it.
local function append(its_stream, remaining_ms, new_ms, entry_fields)
  stream = its_stream
  local entry = redis.call('XADD', stream, '*', unpack(entry_fields))
  clock_ms = clock_ms or tonumber(string.match(entry, '%d+'))
  keep_jobs_for(remaining_ms, new_ms)
  return entry
end

local function waiting_until(ms, requester)
  return string.format('%.0f %s', now_ms() + tonumber(ms), requester)
end

local live  -- of `live_requesters`: read at most once, behind what the script writes of them

-- And their fields. Those whose time is over are removed; `is_timeless`: they count, and the clock is not read.
local function live_requesters(is_timeless)
  if live then return live.requesters, live.fields end
  live = {requesters = {}, fields = {}}
  for _, each in ipairs(waits) do
    local till, requester = string.match(each[2], '^(%d+) (.*)$')
    if not is_timeless and tonumber(till) < now_ms() then
      redis.call('HDEL', flight, each[1])
    else
      table.insert(live.requesters, requester)
      table.insert(live.fields, each[1])
    end
  end
  return live.requesters, live.fields
end

local function with_requesters(result)
  local reply = {result}
  for _, requester in ipairs(live_requesters()) do reply[#reply + 1] = requester end
  return reply
end

local function end_if_left()
  if #live_requesters() > 0 then return false end
  redis.call('DEL', flight)
  return true
end

local function is_after(a, b)  -- of two ids of entries
  local a_ms, a_seq = string.match(a, '(%d+)-(%d+)')
  local b_ms, b_seq = string.match(b, '(%d+)-(%d+)')
  a_ms, b_ms = tonumber(a_ms), tonumber(b_ms)
  if a_ms ~= b_ms then return a_ms > b_ms end
  return tonumber(a_seq) > tonumber(b_seq)
end

local function take_off_stream(group, entry)
  if entry == '' or stream == '' then return end
  pcall(function() redis.call('XACK', stream, group, entry) end)
  redis.call('XDEL', stream, entry)
end

-- Whether an encoder will still get this entry. Does not read it: it may hold media.
local function is_on_stream(group, entry)
  if entry == '' or stream == '' or redis.call('XLEN', stream) == 0 then return false end
  for _, fields in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
    if info['name'] == group then
      return is_after(entry, info['last-delivered-id'])
        or #redis.call('XPENDING', stream, group, entry, entry, 1) > 0
    end
  end
  return true  -- the group is about to be made, from the start of the stream
end
