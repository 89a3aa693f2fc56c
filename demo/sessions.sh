# shellcheck shell=bash
# Drives several psql processes at once and prints what each is told and what it answers.
#
# Invariants
# - A session is one psql, on one connection, from session_open to the end of the script.
# - Nothing is printed as an answer that psql did not print; what is typed is sent as it is printed.
# - A session that is gone or does not answer in time ends the script with an error: it never hangs.
# - No psql outlives the script, not even a frozen one: the kernel kills it when its parent dies.

set -euo pipefail

answer_s_max=60
started_at=$EPOCHREALTIME
declare -A session_pid=() session_in=() session_out=() session_colour=()
answer=() sqlstate=''

bold='' faint='' red='' plain='' colours=('' '' '')
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ] && [ "${TERM:-dumb}" != dumb ]; then
  bold=$'\e[1m' faint=$'\e[2m' red=$'\e[31m' plain=$'\e[0m' colours=($'\e[36m' $'\e[33m' $'\e[35m')
fi

sessions_start() {
  trap sessions_end EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  # to write to a psql that is gone is an error like any other
  trap '' PIPE
}

sessions_end() {
  local status=$?
  trap - EXIT
  [ ${#session_pid[@]} -eq 0 ] || kill -KILL "${session_pid[@]}" 2>/dev/null || true
  exit "$status"
}

# session_open NAME: a psql that leaves out source positions and tells NULL from an empty text; Ctrl-C is not for it
session_open() {
  local name=$1 fifos in out
  fifos=$(mktemp -d "${TMPDIR:-/tmp}/leasehold-demo.XXXXXX")
  mkfifo "$fifos/in" "$fifos/out"
  PGAPPNAME=$name setsid setpriv --pdeathsig KILL psql -X -P pager=off -P null=NULL -v SHOW_CONTEXT=never \
    <"$fifos/in" >"$fifos/out" 2>&1 &
  session_pid[$name]=$!
  exec {in}>"$fifos/in" {out}<"$fifos/out"
  rm -r "$fifos"
  session_in[$name]=$in session_out[$name]=$out
  session_colour[$name]=${colours[$(((${#session_pid[@]} - 1) % ${#colours[@]}))]}
}

# ask NAME SQL: sends without printing; sets answer (lines) and sqlstate (00000: no error)
ask() {
  local line mark='--- answered'
  printf '%s\n\\echo %s :SQLSTATE\n' "$2" "$mark" 2>/dev/null 1>&"${session_in[$1]}" || fail "$1 is gone"
  answer=()
  while next_line "$1" && [[ $line != "$mark "* ]]; do
    answer+=("$line")
  done
  sqlstate=${line##* }
  # psql ends a table with an empty line
  [ ${#answer[@]} -eq 0 ] || [ -n "${answer[-1]}" ] || unset 'answer[-1]'
}

next_line() {
  local status=0
  IFS= read -r -t "$answer_s_max" line <&"${session_out[$1]}" || status=$?
  [ "$status" -le 128 ] || fail "$1 has not answered for $answer_s_max seconds"
  [ "$status" -eq 0 ] || fail "$1 is gone"
}

# type_in NAME SQL [SQLSTATE]: prints what is typed, sends it, prints the answer; any SQLSTATE but that one ends the story
type_in() {
  print_typed "$1" "$2"
  ask "$1" "$2"
  print_answer
  expect "the SQLSTATE of what $1 typed last" "${3:-00000}" "$sqlstate"
}

# type_until NAME SQL: as type_in, then asks again until the answer is not NULL
type_until() {
  local asked=0
  type_in "$1" "$2"
  [ "$(cell)" = NULL ] || fail "$1 was not made to wait"
  while [ "$(cell)" = NULL ]; do
    sleep 0.2
    ask "$1" "$2"
    asked=$((asked + 1))
    [ $((asked * 2)) -lt $((answer_s_max * 10)) ] || fail "$1 never got an answer other than NULL to: $2"
  done
  happens "$1 asks the same again every 0.2 s; after $asked times:"
  print_answer
}

# The first column of the first row of the answer.
cell() {
  local row=${answer[2]:-}
  row=${row%%|*}
  row=${row#"${row%%[! ]*}"}
  printf '%s' "${row%"${row##*[! ]}"}"
}

# The answer to a question of the script's own, which is not part of the story.
value() {
  ask "$1" "$2"
  cell
}

clock() {
  local us=$((${EPOCHREALTIME/[.,]/} - ${started_at/[.,]/}))
  printf '%5d.%d s' $((us / 1000000)) $((us % 1000000 / 100000))
}

# The prompt is psql's: => begins a statement, -> goes on with it.
print_typed() {
  local line prompt='=>' said_by
  said_by="$(clock)  ${session_colour[$1]}$(printf '%-8s' "$1")$plain"
  while IFS= read -r line; do
    printf '%s  %s %s%s%s\n' "$said_by" "$prompt" "$bold" "$line" "$plain"
    said_by=$(printf '%19s' '')
    case $line in *\;) prompt='=>' ;; *) prompt='->' ;; esac
  done <<<"$2"
}

print_answer() {
  local line colour=$faint
  [ "$sqlstate" = 00000 ] || colour=$red
  for line in "${answer[@]}"; do
    printf '%22s  %s%s%s\n' '' "$colour" "$line" "$plain"
  done
  [ "$sqlstate" = 00000 ] || printf '%22s  %sSQLSTATE: %s%s\n' '' "$colour" "$sqlstate" "$plain"
  echo
}

# happens TEXT: an event that is no SQL
happens() { printf '%s  %s%s%s\n\n' "$(clock)" "$faint" "($1)" "$plain"; }

# The process of a session stops running, or runs again.
freeze() { kill -STOP "${session_pid[$1]}"; }
thaw() { kill -CONT "${session_pid[$1]}"; }

heading() { printf '\n%s%s%s\n%s\n\n' "$bold" "$1" "$plain" "${1//?/=}"; }
tell() {
  printf '%s\n' "$*" | tr -s ' \n' ' ' | fold -s -w 88 | sed 's, *$,,'
  printf '\n\n'
}

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 1
}

# expect WHAT WANTED FOUND
expect() {
  [ "$2" = "$3" ] || fail "the story ended wrong: $1 is '$3' and should be '$2'"
}
