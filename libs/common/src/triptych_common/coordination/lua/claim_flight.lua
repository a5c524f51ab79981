-- A gateway's requesters join the item's flight, or its gateway becomes the owner and publishes the job.
-- KEYS: flight *streams    those of the item's namespace that the gateway may publish to
-- ARGV: mode job attempt max_attempts ttl_ms claim_ms max_sends group with_backlog may_move *requesters
-- `requesters`: field, requester as JSON, field, ...
-- `with_backlog` 1: an owner, who is about to publish, gets what waits on the streams too
-- `may_move` 1: each of `streams` has encoders, so a job on another stream waits for none

local function answer(result)
  local reply = {result, get('job'), tonumber(get('attempt')) or tonumber(attempt), get('metadata'), get('failure')}
  if result == 'owner' and with_backlog == '1' then reply[6] = read_backlogs(streams, group) end
  return reply
end

local function join()
  for i = 1, #requesters, 2 do put(requesters[i], waiting_until(ttl_ms, requesters[i + 1])) end
  live_for(ttl_ms)
  keep_jobs_for(ttl_ms)
end

local function own(its_job, its_attempt, ...)
  become('claimed', put, {'entry', 'stream', 'encoder', 'failure', 'metadata', ...},
    'job', its_job, 'attempt', its_attempt, 'until', now_ms() + tonumber(claim_ms))
  stream = ''
  join()
  return answer('owner')
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
join()
return answer('joined')
