# What the guests' scripts share. busybox's sh; the owner may be in another guest (PEER) or in this.
URL=http://127.0.0.1:8000
OWNER_HOST=$SELF
OWNER=""
[ $LINK = eth0 ] && [ $SELF != 10.77.0.1 ] && OWNER_HOST=$PEER

# With the guest's own clock, so that a slow test shows where.
say() {
  local up idle
  read up idle </proc/uptime
  echo "[$up] $*"
}

fail() {
  say "FAILED: $*"
  exit 1
}

# repeat SECONDS COMMAND...: until it succeeds. The limits are for a busy host: a quiet one takes a
# tenth of it.
repeat() {
  local left=$(($1 * 5))
  shift
  until "$@"; do
    left=$((left - 1))
    [ $left -gt 0 ] || fail "waited for: $*"
    sleep 0.2
  done
}

start_owner() {
  : >/tmp/owner # or the last one's word would be taken for this one's
  ./link_owner --transport=verbs --listen-host=$SELF --listen-port=7471 "$@" >/tmp/owner 2>&1 &
  OWNER=$!
  repeat 60 grep -q ready /tmp/owner
}

connects() {
  : >/tmp/front_end # as above
  ./link_front_end --transport=verbs --connect-host=$OWNER_HOST --http-port=8000 "$@" \
    >/tmp/front_end 2>&1 &
  FRONT_END=$!
  while kill -0 $FRONT_END 2>/dev/null; do
    grep -q http:// /tmp/front_end && cat /tmp/front_end && return 0
    sleep 0.2
  done
  tail -1 /tmp/front_end
  return 1
}

start_front_end() {
  repeat 60 connects "$@"
}

# refused OPTION PHRASE: a second front end is told why it may not.
refused() {
  ./link_front_end --transport=verbs --connect-host=$OWNER_HOST "$1" >/tmp/refused 2>&1 &&
    fail "not refused: $1"
  cat /tmp/refused
  grep -q "$2" /tmp/refused || fail "refused with other words than '$2'"
}

is_serving() {
  wget -q -O /tmp/health $URL/health && grep -q '"serving"' /tmp/health
}

is_unhealthy() {
  wget -O /dev/null $URL/health 2>&1 | grep -q 503
}

expect_serving() {
  repeat 60 is_serving
  say serving
}

expect_unhealthy() {
  repeat 60 is_unhealthy
  say unhealthy
  wget -O /dev/null --header 'Content-Type: application/json' --post-data '{"prompt":"x"}' \
    $URL/v1/completions 2>&1 | grep 503 || fail "a request without a ring is not answered with 503"
}

# ask TEXT: the owner answers with the prompt; the answer must be whole.
is_answered() {
  wget -q -O /tmp/answer --header 'Content-Type: application/json' \
    --post-data "{\"prompt\":\"$1\",\"max_tokens\":200}" $URL/v1/completions
}

# A full ring is told with 429 for a moment after a restart: a client tries again.
ask() {
  repeat 60 is_answered "$1"
  grep -q "\"text\":\"$1\"" /tmp/answer || fail "asked '$1', got $(cat /tmp/answer)"
  say "answered: $1"
}

# A long request that its client never sees the end of.
hang() {
  wget -q -O /dev/null --header 'Content-Type: application/json' \
    --post-data '{"prompt":"in flight","max_tokens":1000,"ignore_eos":true}' $URL/v1/completions
}

# Until the other guest has ended.
wait_for_the_other() {
  local line=""
  until [ "$line" = over ]; do read line </dev/ttyS0; done
}
