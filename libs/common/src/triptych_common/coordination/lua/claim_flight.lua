-- A gateway's requesters join the item's flight, or its gateway becomes the owner, who publishes the job: at once
-- the one that it offers, else by `publish_job`.
-- KEYS: flight *streams    those of the item's namespace that the gateway may publish to
-- ARGV: mode job attempt max_attempts ttl_ms claim_ms max_sends group with_backlog may_move offered remaining_ms new_ms max_oldest_ms num_fields *rest
-- `with_backlog` 1: an owner gets what waits on the streams too, without the offered job
-- `may_move` 1: each of `streams` has encoders, so a job on another stream waits for none
-- `offered`: which of `streams` the offered job is for; 0: none is offered. Others are as for `publish_job`
-- `max_oldest_ms`: it is left where a job waits for longer at each store, as far as the streams are read; '': never
-- `rest`: `num_fields` of the offered entry; then field, requester as JSON, field, ...
local first_requester = num_fields + 1

local function answer(result, entry, backlogs)
  local reply = {result, get('job'), tonumber(get('attempt')) or tonumber(attempt), get('metadata'), get('failure')}
  reply[6], reply[7] = entry or '', backlogs
  return reply
end

local function waiting()
  local found = {}
  for i = first_requester, #rest, 2 do
    found[#found + 1], found[#found + 2] = rest[i], waiting_until(ttl_ms, rest[i + 1])
  end
  return found
end

local function is_slow(backlogs)
  if not backlogs or max_oldest_ms == '' then return false end
  for i = 2, #backlogs, 2 do
    if backlogs[i] < tonumber(max_oldest_ms) then return false end
  end
  return true
end

local function own(its_job, its_attempt, ...)
  local ended = {'entry', 'stream', 'encoder', 'failure', 'metadata', ...}
  local backlogs = with_backlog == '1' and read_backlogs(streams, group) or nil
  if offered == '0' or its_job ~= job or tonumber(its_attempt) ~= tonumber(attempt) or is_slow(backlogs) then
    become('claimed', put, ended,
      'job', its_job, 'attempt', its_attempt, 'until', now_ms() + tonumber(claim_ms), unpack(waiting()))
    live_for(ttl_ms)
    return answer('owner', '', backlogs)
  end
  local entry = append(streams[tonumber(offered)], remaining_ms, new_ms, {unpack(rest, 1, num_fields)})
  become('claimed', note, ended)
  become('queued', put, {}, 'job', job, 'attempt', attempt, 'entry', entry, 'stream', stream,
    'num_sent', (tonumber(get('num_sent')) or 0) + 1, unpack(waiting()))
  live_for(ttl_ms)
  return answer('owner', entry, backlogs)
end

local function is_stranded()  -- the encoders of its stream are gone, those of others are not
  if may_move ~= '1' then return false end
  for _, each in ipairs(streams) do
    if each == stream then return false end
  end
  return stream ~= ''
end

if state == '' then return own(job, tonumber(attempt)) end
if state == 'failed' then
  local failed = tonumber(get('attempt'))
  if mode == 'check' then return answer('failed') end
  if failed < tonumber(max_attempts) then return own(job, failed + 1, 'num_sent') end
  if mode == 'retry' then return answer('exhausted') end
  return own(job, 1, 'num_sent')
end
-- Without metadata: the flight was lost and claimed again while its encoder finished, so its result was lost too.
if state == 'finished' and (mode ~= 'check' or get('metadata') == '') then return own(job, 1, 'num_sent') end
local is_over = now_ms() > (tonumber(get('until')) or 0)
local is_ours = get('job') == job and mode ~= 'check'  -- a check may know the job of another gateway
if state == 'claimed' and (is_over or is_ours) then return own(get('job'), get('attempt')) end
if state == 'queued' or (state == 'running' and is_over) then
  if is_stranded() or not is_on_stream(group, get('entry')) then
    if (tonumber(get('num_sent')) or 0) >= tonumber(max_sends) then return answer('exhausted') end
    take_off_stream(group, get('entry'))
    return own(get('job'), get('attempt'))
  end
end
if first_requester <= #rest then put(unpack(waiting())) end
live_for(ttl_ms)
keep_jobs_for(ttl_ms)
return answer('joined')
