//! A piece of shared memory with its locks, made when the server starts: its name, its size, what it begins with.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pgrx::{PgSharedMemoryInitialization, pg_sys};

use super::lwlock::LwLock;

/// Index of `AddinShmemInitLock` among the main LWLocks, the same in PostgreSQL 15 to 18.
const ADDIN_SHMEM_INIT_LOCK: usize = 21;

/// A piece of shared memory. A static, to be registered by `pg_shmem_init!` while preloading.
pub struct Memory {
    /// In `pg_shmem_allocations`, and of the locks' wait event.
    name: &'static CStr,
    /// Bytes, 0 for none at all; the same in every process of a server.
    size: fn() -> usize,
    /// How many lightweight locks go with it.
    locks: fn() -> usize,
    /// Writes all of it that is read later, before anyone else sees it: in the postmaster, at the start and again
    /// after a crash.
    initialise: unsafe fn(*mut u8),
    /// Called whenever the startup hook has run, without a lock.
    then: fn(),
    /// Both null until the startup hook has run.
    start: AtomicPtr<u8>,
    first_lock: AtomicPtr<pg_sys::LWLockPadded>,
}

impl Memory {
    /// Without locks.
    ///
    /// # Safety
    /// `initialise` gets memory of `size` bytes, aligned to 64, that holds anything.
    pub const unsafe fn new(
        name: &'static CStr,
        size: fn() -> usize,
        initialise: unsafe fn(*mut u8),
    ) -> Memory {
        Memory {
            name,
            size,
            locks: || 0,
            initialise,
            then: || (),
            start: AtomicPtr::new(std::ptr::null_mut()),
            first_lock: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// With so many.
    pub const fn with_locks(self, locks: fn() -> usize) -> Memory {
        Memory { locks, ..self }
    }

    /// With something to do once it is there.
    pub const fn and_then(self, then: fn()) -> Memory {
        Memory { then, ..self }
    }

    /// Where it starts; null where the library was not preloaded, or nothing was asked for.
    pub fn start(&self) -> *mut u8 {
        self.start.load(Ordering::Acquire)
    }

    /// One of its locks, by a number below what `with_locks` said.
    pub fn lock(&self, number: usize) -> LwLock {
        let first = self.first_lock.load(Ordering::Acquire);
        assert!(!first.is_null(), "the locks are not there");
        // SAFETY: the tranche has as many locks as were asked for, for the life of the process
        unsafe { LwLock::at(first.add(number)) }
    }
}

impl PgSharedMemoryInitialization for Memory {
    type Value = ();

    unsafe fn on_shmem_request(&'static self) {
        // SAFETY: called from the request hook, where both are allowed
        unsafe {
            pg_sys::RequestAddinShmemSpace((self.size)());
            match (self.locks)() {
                0 => {}
                locks => pg_sys::RequestNamedLWLockTranche(self.name.as_ptr(), locks as i32),
            }
        }
    }

    unsafe fn on_shmem_startup(&'static self, _value: ()) {
        // the hook runs again after a crash, and these would point into the memory that is gone
        self.start.store(std::ptr::null_mut(), Ordering::Release);
        self.first_lock
            .store(std::ptr::null_mut(), Ordering::Release);
        let size = (self.size)();
        if size == 0 {
            return;
        }
        // SAFETY: called from the startup hook; the lock is one of the main array, held around the
        // look-up and the first initialisation, as `ShmemInitStruct` demands
        unsafe {
            let held = LwLock::at(pg_sys::MainLWLockArray.add(ADDIN_SHMEM_INIT_LOCK)).exclusive();
            let mut found = false;
            let memory = pg_sys::ShmemInitStruct(self.name.as_ptr(), size, &mut found).cast();
            if !found {
                (self.initialise)(memory);
            }
            drop(held);
            if (self.locks)() != 0 {
                self.first_lock.store(
                    pg_sys::GetNamedLWLockTranche(self.name.as_ptr()),
                    Ordering::Release,
                );
            }
            self.start.store(memory, Ordering::Release);
        }
        (self.then)();
    }
}
