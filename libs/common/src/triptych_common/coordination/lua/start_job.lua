-- An encoder took the job from the stream. `metadata`: the item's size, if it is known by now, for requesters
-- that join later; else ''.
-- KEYS: flight its_stream    from which the encoder took it
-- ARGV: job entry encoder lease_ms ttl_ms attempt metadata *requesters
-- `requesters`: those that the job names, as of a claim
if state == '' then
  if #redis.call('XRANGE', its_stream, entry, entry) == 0 then return {'gone'} end
  -- Redis lost the flight, but not the job: the requesters are those that it names.
  become('claimed', try_put, {}, 'job', job, 'attempt', attempt, 'num_sent', 1)
  for i = 1, #requesters, 2 do try_put(requesters[i], waiting_until(ttl_ms, requesters[i + 1])) end
elseif get('job') ~= job or state == 'failed' or state == 'finished' then
  return {'superseded'}
elseif state == 'running' and (get('entry') ~= entry or stream ~= its_stream) and now_ms() <= tonumber(get('until')) then
  return {'superseded'}
elseif end_if_left() then
  return {'unwanted'}
end
become('running', try_put, {}, 'entry', entry, 'stream', its_stream, 'encoder', encoder,
  'until', now_ms() + lease_ms, unpack(metadata ~= '' and {'metadata', metadata} or {}))
if is_new then live_for(ttl_ms) end  -- else it lives as long as its requesters wait
return with_requesters('started')
