//! A piece of shared memory, made when the server starts: its name, its size, and what it begins with.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use pgrx::{PgSharedMemoryInitialization, pg_sys};

use super::lwlock::LwLock;

/// Index of `AddinShmemInitLock` among the main LWLocks, the same in PostgreSQL 15 to 18.
const ADDIN_SHMEM_INIT_LOCK: usize = 21;

/// A piece of shared memory. A static, to be registered by `pg_shmem_init!` while preloading.
pub struct Memory {
    name: &'static CStr,
    /// Bytes; the same in every process of a server.
    size: fn() -> usize,
    /// Writes all of it that is read later, before anyone else sees it.
    initialise: unsafe fn(*mut u8),
    /// Null until the startup hook has run.
    start: AtomicPtr<u8>,
}

impl Memory {
    /// # Safety
    /// `initialise` gets zeroed or arbitrary memory of `size` bytes, aligned to 64.
    pub const unsafe fn new(
        name: &'static CStr,
        size: fn() -> usize,
        initialise: unsafe fn(*mut u8),
    ) -> Memory {
        Memory {
            name,
            size,
            initialise,
            start: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Where it starts; null where the library was not preloaded, or nothing was asked for.
    pub fn start(&self) -> *mut u8 {
        self.start.load(Ordering::Acquire)
    }
}

impl PgSharedMemoryInitialization for Memory {
    type Value = ();

    unsafe fn on_shmem_request(&'static self) {
        // SAFETY: called from the request hook, where it is allowed
        unsafe { pg_sys::RequestAddinShmemSpace((self.size)()) };
    }

    unsafe fn on_shmem_startup(&'static self, _value: ()) {
        // the hook runs again after a crash, and this would point into the memory that is gone
        self.start.store(std::ptr::null_mut(), Ordering::Release);
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
            self.start.store(memory, Ordering::Release);
        }
    }
}
