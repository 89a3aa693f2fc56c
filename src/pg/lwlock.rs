//! PostgreSQL's lightweight locks as guards.
//!
//! **Nothing that can raise an error, allocate, log or call SPI may happen while a guard lives.**
//! Where an error comes all the same, transaction abort releases every LWLock of the backend before
//! our callbacks run, and the guard notices by the interrupt holdoff count being zero.

use pgrx::pg_sys;

mod raw {
    use pgrx::pg_sys::{LWLock, LWLockMode};

    // called without pgrx's guard, which costs as much as the lock itself: they raise only when a
    // backend holds 200 locks, and we hold two at most
    unsafe extern "C-unwind" {
        pub fn LWLockAcquire(lock: *mut LWLock, mode: LWLockMode::Type) -> bool;
        pub fn LWLockRelease(lock: *mut LWLock);
    }
}

/// One LWLock in shared memory.
#[derive(Clone, Copy)]
pub struct LwLock(*mut pg_sys::LWLock);

/// A held LWLock.
pub struct Held(*mut pg_sys::LWLock);

impl LwLock {
    /// # Safety
    /// `padded` must be the address of a lock of a named tranche, in shared memory for the life of
    /// the process.
    pub unsafe fn at(padded: *mut pg_sys::LWLockPadded) -> LwLock {
        // SAFETY: the padded lock is a union whose first member is the lock
        LwLock(unsafe { &raw mut (*padded).lock })
    }

    /// Waits for the lock in share mode.
    pub fn share(self) -> Held {
        // SAFETY: the address is good by `at`; waits hold off nothing that we hold in another order
        unsafe { raw::LWLockAcquire(self.0, pg_sys::LWLockMode::LW_SHARED) };
        Held(self.0)
    }

    /// Waits for the lock in exclusive mode.
    pub fn exclusive(self) -> Held {
        // SAFETY: as `share`
        unsafe { raw::LWLockAcquire(self.0, pg_sys::LWLockMode::LW_EXCLUSIVE) };
        Held(self.0)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the lock was acquired by the constructor; a zero holdoff count means that an error
        // has been raised since, and the abort has released or will release it
        unsafe {
            if pg_sys::InterruptHoldoffCount > 0 {
                raw::LWLockRelease(self.0);
            }
        }
    }
}
