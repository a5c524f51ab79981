"""The steps of a flight as Redis runs them: each script is atomic. `inflight` says what they mean.

A flight is one hash: `job`, `attempt`, `state` (claimed, queued, running, finished, failed), `until`
(Redis' clock, ms: when a claim or an encoder's lease is over), `entry` (of the job on the stream),
`encoder`, `num_sent`, `metadata` and `failure` (messages as JSON), and one field `r:{request}/{item}` per
subscriber: until when it waits (Redis' clock, ms), a space, the requester as JSON. Who waits no longer is
forgotten when the flight is next looked at: a gateway that died took nobody off.

Keys: the flight; of the steps that look at jobs also the stream of the item's namespace.
"""

_COMMON = """
pcall(function() redis.replicate_commands() end)  -- before Redis 7 a script must ask to read the clock
local flight, stream = KEYS[1], KEYS[2]

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function get(field)
  return redis.call('HGET', flight, field) or ''
end

local function live_for(ms)
  if redis.call('PTTL', flight) < tonumber(ms) then redis.call('PEXPIRE', flight, ms) end
end

local function keep_jobs_for(ms)  -- the stream outlives whoever waits for a job on it
  local left = redis.call('PTTL', stream)
  if left ~= -2 and left < tonumber(ms) then redis.call('PEXPIRE', stream, ms) end
end

local function waiting_until(ms, requester)
  return string.format('%.0f %s', now_ms() + tonumber(ms), requester)
end

local function subscribers()  -- and their fields
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

local function with_subscribers(what)
  local reply = {what}
  for _, requester in ipairs(subscribers()) do reply[#reply + 1] = requester end
  return reply
end

local function note(...)  -- what a Redis out of memory may refuse: nobody's work ends for that
  local reply = redis.pcall('HSET', flight, ...)
  return not (type(reply) == 'table' and reply.err)
end

local function end_if_left()
  if #subscribers() > 0 then return false end
  redis.call('DEL', flight)
  return true
end

local function after(a, b)  -- of two ids of entries
  local a_ms, a_seq = string.match(a, '(%d+)-(%d+)')
  local b_ms, b_seq = string.match(b, '(%d+)-(%d+)')
  a_ms, b_ms = tonumber(a_ms), tonumber(b_ms)
  if a_ms ~= b_ms then return a_ms > b_ms end
  return tonumber(a_seq) > tonumber(b_seq)
end

-- Whether somebody will still get this entry. Does not read it: it may hold media.
local function is_on_stream(group, entry)
  if entry == '' or redis.call('XLEN', stream) == 0 then return false end
  for _, fields in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
    if info['name'] == group then
      return after(entry, info['last-delivered-id'])
        or #redis.call('XPENDING', stream, group, entry, entry, 1) > 0
    end
  end
  return true  -- the group is about to be made, from the start of the stream
end
"""

CLAIM = (
    _COMMON
    + """
local mode, job, attempt, max_attempts = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local ttl_ms, claim_ms, max_sends, group = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
local state = get('state')

local function answer(what)
  return {what, get('job'), tonumber(get('attempt')) or attempt, get('metadata'), get('failure')}
end

local function subscribe()
  for i = 9, #ARGV, 2 do redis.call('HSET', flight, ARGV[i], waiting_until(ttl_ms, ARGV[i + 1])) end
  live_for(ttl_ms)
  keep_jobs_for(ttl_ms)
end

local function own(its_job, its_attempt)
  redis.call('HDEL', flight, 'entry', 'encoder', 'failure', 'metadata')
  redis.call('HSET', flight, 'job', its_job, 'attempt', its_attempt, 'state', 'claimed',
    'until', now_ms() + claim_ms)
  subscribe()
  return answer('owner')
end

if state == '' then return own(job, attempt) end
if state == 'failed' then
  local failed = tonumber(get('attempt'))
  if mode == 'check' then return answer('failed') end
  if failed < max_attempts then
    redis.call('HDEL', flight, 'num_sent')
    return own(job, failed + 1)
  end
  if mode == 'retry' then return answer('exhausted') end
  redis.call('HDEL', flight, 'num_sent')
  return own(job, 1)
end
-- Without metadata: it was lost and claimed again while its encoder finished, so what that said was lost too.
if state == 'finished' and (mode ~= 'check' or get('metadata') == '') then
  redis.call('HDEL', flight, 'num_sent')
  return own(job, 1)
end
local is_over = now_ms() > (tonumber(get('until')) or 0)
local is_ours = get('job') == job and mode ~= 'check'  -- a check may know the job of another
if state == 'claimed' and (is_over or is_ours) then return own(get('job'), get('attempt')) end
if state == 'queued' or (state == 'running' and is_over) then
  if not is_on_stream(group, get('entry')) then
    if (tonumber(get('num_sent')) or 0) >= max_sends then return answer('exhausted') end
    return own(get('job'), get('attempt'))
  end
end
subscribe()
return answer('joined')
"""
)

PUBLISH = (
    _COMMON
    + """
if get('job') ~= ARGV[1] then return '' end
if get('state') ~= 'claimed' then return get('entry') end
local arguments = {}
for i = 3, #ARGV do arguments[i - 2] = ARGV[i] end
local entry = redis.call('XADD', stream, '*', unpack(arguments))
keep_jobs_for(ARGV[2])
redis.call('HSET', flight, 'state', 'queued', 'entry', entry)
redis.call('HINCRBY', flight, 'num_sent', 1)
return entry
"""
)

LEAVE = (
    _COMMON
    + """
local group = ARGV[1]
for i = 2, #ARGV do redis.call('HDEL', flight, ARGV[i]) end
local state = get('state')
if state == '' or state == 'running' then return 0 end
if #subscribers() > 0 then
  if state == 'claimed' then note('until', 0) end  -- it may have been the owner who left
  return 0
end
local entry = get('entry')
redis.call('DEL', flight)
if state ~= 'queued' then return 0 end
pcall(function() redis.call('XACK', stream, group, entry) end)
redis.call('XDEL', stream, entry)
return 1
"""
)

START = (
    _COMMON
    + """
local job, entry, encoder, lease_ms, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local state = get('state')
if state == '' then
  if #redis.call('XRANGE', stream, entry, entry) == 0 then return {'unwanted'} end
  -- The flight is lost, the job is not: those whom it names are its subscribers.
  note('job', job, 'attempt', ARGV[6], 'num_sent', 1)
  for i = 7, #ARGV, 2 do note(ARGV[i], waiting_until(ttl_ms, ARGV[i + 1])) end
elseif get('job') ~= job or state == 'failed' or state == 'finished' then
  return {'superseded'}
elseif state == 'running' and get('entry') ~= entry and now_ms() <= tonumber(get('until')) then
  return {'superseded'}
elseif end_if_left() then
  return {'unwanted'}
end
note('state', 'running', 'entry', entry, 'encoder', encoder, 'until', now_ms() + lease_ms)
live_for(ttl_ms)
return with_subscribers('started')
"""
)

RENEW = (
    _COMMON
    + """
local job, entry, encoder, lease_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local state = get('state')
if get('job') ~= job or state == 'failed' or state == 'finished' then return 0 end
if state == 'running' and get('encoder') ~= encoder then return 0 end
-- Claimed or queued again: Redis lost what it knew, and those who wait sent the job once more.
note('state', 'running', 'entry', entry, 'encoder', encoder, 'until', now_ms() + lease_ms)
live_for(lease_ms)
return 1
"""
)

ANNOUNCE = (
    _COMMON
    + """
if get('job') ~= ARGV[1] then return {'gone'} end
note('metadata', ARGV[2])
return with_subscribers('known')
"""
)

FINISH = (
    _COMMON
    + """
if get('job') ~= ARGV[1] then return {'gone'} end
local told = {}
for i = 3, #ARGV do told[ARGV[i]] = true end
local is_told, _, fields = true, subscribers()
for _, field in ipairs(fields) do
  if not told[field] then is_told = false end
end
local reply = with_subscribers(is_told and 'finished' or 'joined')
if not is_told or end_if_left() then return reply end
redis.call('HDEL', flight, 'entry', 'encoder')
if note('state', 'finished') then
  redis.call('PEXPIRE', flight, ARGV[2])
else
  redis.call('DEL', flight)
end
return reply
"""
)

FAIL = (
    _COMMON
    + """
local job, encoder, failure = ARGV[1], ARGV[2], ARGV[3]
if get('job') ~= job then return {'gone'} end
if get('state') == 'finished' then return {'superseded'} end
local owner = get('encoder')  -- nobody's: a full Redis did not note the start
if encoder ~= '' and owner ~= '' and owner ~= encoder then return {'superseded'} end
if end_if_left() then return {'failed'} end
local reply = with_subscribers('failed')
redis.call('HDEL', flight, 'metadata')
if not note('state', 'failed', 'failure', failure, 'until', 0) then redis.call('DEL', flight) end
return reply
"""
)

BACKLOG = """
pcall(function() redis.replicate_commands() end)
local stream, group = KEYS[1], ARGV[1]
local length = redis.call('XLEN', stream)
if length == 0 then return {0, 0} end
local from = '-'
for _, fields in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local info = {}
  for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
  if info['name'] == group then from = '(' .. info['last-delivered-id'] end
end
local oldest = redis.call('XRANGE', stream, from, '+', 'COUNT', 1)[1]
if not oldest then return {length, 0} end
local t = redis.call('TIME')
return {length, t[1] * 1000 + math.floor(t[2] / 1000) - tonumber(string.match(oldest[1], '%d+'))}
"""
