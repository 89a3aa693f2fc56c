//! The one clock that all operations of a run are stamped by: it is the same in all processes of a machine, goes on while
//! they are stopped, and no one can set it.

use rustix::time::{ClockId, clock_gettime};

/// Microseconds of that clock.
pub type Micros = i64;

pub fn now() -> Micros {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec * 1_000_000 + now.tv_nsec / 1000
}

pub const fn millis(ms: u64) -> Micros {
    ms.cast_signed() * 1000
}
