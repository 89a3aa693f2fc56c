# shellcheck shell=bash
# What the scripts share: where things are, which PostgreSQL is meant, and how to become somebody else.
#
# Invariants
# - Sourcing this changes nothing on the machine.
# - No PG* variable of the caller's environment reaches a server or a psql: what happens must not depend on one.
#   PG_CONFIG is the only one that means something here.
# - CARGO*, RUSTFLAGS and the like are left as they are: cargo-pgrx adds linker arguments that RUSTFLAGS would replace.

set -euo pipefail

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
target=$top/target
tools=$target/tools
pg_config_given=${PG_CONFIG:-}
unset "${!PG@}"
PG_CONFIG=$pg_config_given

# rustup puts cargo here, and a shell that was open before does not know yet
command -v cargo >/dev/null || PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin

die() {
  printf 'error: %s\n' "$1" >&2
  shift
  [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
  exit 1
}

is_root() { [ "$(id -u)" -eq 0 ]; }

# Runs a command as root: as it is, or by sudo.
as_root() {
  if is_root; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    die "this needs root: $*" "There is no sudo here. Run the same command as root."
  fi
}

# Runs a command as whoever may run a server: PostgreSQL refuses root, so there it is the postgres user.
# The Rust variables would append backtraces to the server's error details.
as_server() {
  local -a server=(env -u RUST_BACKTRACE -u RUST_LIB_BACKTRACE)
  ! is_root || server+=(runuser -u postgres --)
  "${server[@]}" "$@"
}

# The major version that a pg_config speaks for, or nothing.
pg_major() { "$1" --version 2>/dev/null | sed -nE 's/^PostgreSQL ([0-9]+).*/\1/p' || true; }

pg_supported() { [[ $(pg_major "$1") =~ ^1[5-8]$ ]]; }
pg_has_headers() { [ -e "$("$1" --includedir-server)/postgres.h" ]; }
pg_has_server() { [ -x "$("$1" --bindir)/initdb" ] && [ -x "$("$1" --bindir)/postgres" ]; }
pg_complete() { pg_supported "$1" && pg_has_headers "$1" && pg_has_server "$1"; }

# Debian's /usr/bin/pg_config is a wrapper. The one that it stands for has a path that goes on meaning the same PostgreSQL,
# so that the build does not begin anew because somebody named it otherwise.
pg_config_real() {
  local real
  real=$("$1" --bindir)/pg_config
  if [ -x "$real" ] && [ "$("$real")" = "$("$1")" ]; then printf '%s\n' "$real"; else command -v "$1"; fi
}

# The pg_config to build and test with: the given one, else the one of PATH, else the newest of Debian's layout.
# Prints nothing where there is none with a server and headers of a supported major.
choose_pg_config() {
  if [ -n "$PG_CONFIG" ]; then
    command -v "$PG_CONFIG" >/dev/null || die "PG_CONFIG=$PG_CONFIG: no such command"
    pg_config_real "$PG_CONFIG"
    return
  fi
  local candidate
  for candidate in pg_config /usr/lib/postgresql/{18,17,16,15}/bin/pg_config; do
    if command -v "$candidate" >/dev/null && pg_complete "$candidate"; then
      pg_config_real "$candidate"
      return
    fi
  done
}

# What a script that needs a server says when bootstrap has not run.
need_pg_config() {
  local chosen
  chosen=$(choose_pg_config)
  [ -n "$chosen" ] || die "no PostgreSQL 15 to 18 with its server headers was found" \
    "Run scripts/bootstrap build, or name one: PG_CONFIG=/path/to/pg_config."
  printf '%s\n' "$chosen"
}

# cargo-pgrx must be of exactly the version of the pgrx crate, which Cargo.toml pins.
pgrx_version() { sed -nE 's/^pgrx *=.*"=([0-9.]+)".*/\1/p' "$top/Cargo.toml" | head -n 1; }

# Sets `cargo_pgrx` to the command for the pinned version: the user's own if it is that very one, else the project's.
find_cargo_pgrx() {
  local wanted
  wanted="cargo-pgrx $(pgrx_version)"
  cargo_pgrx=()
  if [ "$("$tools/bin/cargo-pgrx" pgrx --version 2>/dev/null || true)" = "$wanted" ]; then
    cargo_pgrx=("$tools/bin/cargo-pgrx" pgrx)
  elif [ "$(cargo pgrx --version 2>/dev/null || true)" = "$wanted" ]; then
    cargo_pgrx=(cargo pgrx)
  else
    return 1
  fi
}
