-- How much waits on streams of jobs: put in front of the scripts that answer it.
local function backlog_of(stream, group)  -- jobs, and milliseconds that the oldest that no encoder took has waited
  local length = redis.call('XLEN', stream)
  if length == 0 then return 0, 0 end
  local from = '-'
  for _, fields in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
    if info['name'] == group then from = '(' .. info['last-delivered-id'] end
  end
  local oldest = redis.call('XRANGE', stream, from, '+', 'COUNT', 1)[1]
  if not oldest then return length, 0 end
  local t = redis.call('TIME')
  return length, t[1] * 1000 + math.floor(t[2] / 1000) - tonumber(string.match(oldest[1], '%d+'))
end

local function read_backlogs(streams, group)  -- both of each stream, in their order
  local found = {}
  for _, stream in ipairs(streams) do
    local length, waited = backlog_of(stream, group)
    found[#found + 1], found[#found + 2] = length, waited
  end
  return found
end
