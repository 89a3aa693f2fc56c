//! The clock of leases: no one can set it, and it counts while the machine sleeps.

/// Microseconds of `CLOCK_BOOTTIME` (Linux) or `CLOCK_MONOTONIC` (elsewhere). Above 0.
pub fn now_us() -> i64 {
    #[cfg(target_os = "linux")]
    const CLOCK: libc::clockid_t = libc::CLOCK_BOOTTIME;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes to a local of the right type; fails only for an unknown clock
    let failed = unsafe { libc::clock_gettime(CLOCK, &mut time) };
    assert!(failed == 0, "clock_gettime failed");
    #[allow(clippy::useless_conversion)]
    let (s, ns) = (i64::from(time.tv_sec), i64::from(time.tv_nsec));
    s * 1_000_000 + ns / 1000
}
