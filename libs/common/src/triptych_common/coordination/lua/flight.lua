-- What the scripts of a flight share; ALLOWED, the table of `flight_state`, is put in front of it.
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function get(field)
  return redis.call('HGET', flight, field) or ''
end

local function put(...)
  redis.call('HSET', flight, ...)
  return true
end

local function try_put(...)  -- false: a Redis out of memory refuses it, and the caller's work goes on
  local reply = redis.pcall('HSET', flight, ...)
  return not (type(reply) == 'table' and reply.err)
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
  if #ended > 0 then redis.call('HDEL', flight, unpack(ended)) end
  return write('state', to, ...)
end

local function live_for(ms)
  if redis.call('PTTL', flight) < tonumber(ms) then redis.call('PEXPIRE', flight, ms) end
end

local function keep_jobs_for(ms)  -- the stream lives as long as a requester waits for a job on it
  if stream == '' then return end
  local left = redis.call('PTTL', stream)
  if left ~= -2 and left < tonumber(ms) then redis.call('PEXPIRE', stream, ms) end
end

local function waiting_until(ms, requester)
  return string.format('%.0f %s', now_ms() + tonumber(ms), requester)
end

local function live_requesters()  -- and their fields; those whose time is over are removed
  local found, fields, now, all = {}, {}, now_ms(), redis.call('HGETALL', flight)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 2) == 'r:' then
      local till, requester = string.match(all[i + 1], '^(%d+) (.*)$')
      if tonumber(till) < now then
        redis.call('HDEL', flight, all[i])
      else
        found[#found + 1], fields[#fields + 1] = requester, all[i]
      end
    end
  end
  return found, fields
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
