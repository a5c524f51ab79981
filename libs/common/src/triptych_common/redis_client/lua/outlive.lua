-- Each of KEYS that is there lasts ARGV[1] milliseconds from now on, or longer where it did already.
for _, key in ipairs(KEYS) do
  local left = redis.call('PTTL', key)
  if left ~= -2 and left < tonumber(ARGV[1]) then redis.call('PEXPIRE', key, ARGV[1]) end
end
return 1
