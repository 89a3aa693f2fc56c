//! Heavyweight locks: the fence lock of a resource, the lock of the token sequence, those of a role's quota and of a break.
//!
//! All live in the advisory tag space under class numbers of our own, so they are seen in
//! `pg_locks` (`locktype` advisory, `objsubid` the class), are kept by prepared transactions over a
//! restart, and cannot be taken by `pg_advisory_lock`, which uses the classes 1 and 2.

use pgrx::pg_sys;

use super::Oid;
use super::sessions::{self, Holder};

/// Class of the fence locks: "LH".
const FENCE_CLASS: u16 = 0x4C48;
/// Class of the lock under which a block of tokens is reserved.
const TOKENS_CLASS: u16 = 0x4C49;
/// Class of the locks under which a role's leases are counted.
const QUOTA_CLASS: u16 = 0x4C4A;
/// Class of the locks of those who break the lease on a resource.
const BREAK_CLASS: u16 = 0x4C4B;

/// Locks go to the subtransaction that takes them, not to the portal that happens to run: a portal of an
/// outer level that fails inside a savepoint takes its locks with it, and what was checked under them
/// would stay.
struct OfSubtransaction(pg_sys::ResourceOwner);

impl OfSubtransaction {
    fn begin() -> OfSubtransaction {
        // SAFETY: variables of this backend; an abort sets them itself
        unsafe {
            let before = pg_sys::CurrentResourceOwner;
            pg_sys::CurrentResourceOwner = pg_sys::CurTransactionResourceOwner;
            OfSubtransaction(before)
        }
    }
}

impl Drop for OfSubtransaction {
    fn drop(&mut self) {
        // SAFETY: what was there before; after an error the abort sets its own
        unsafe { pg_sys::CurrentResourceOwner = self.0 };
    }
}

fn tag(key: u64, class: u16) -> pg_sys::LOCKTAG {
    pg_sys::LOCKTAG {
        locktag_field1: super::database(),
        locktag_field2: (key >> 32) as u32,
        locktag_field3: key as u32,
        locktag_field4: class,
        locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
        locktag_lockmethodid: pg_sys::USER_LOCKMETHOD as u8,
    }
}

/// Takes the fence lock in share mode until the (sub)transaction ends. Waits only for the moment in
/// which a grant is recorded. 53200 when the lock table is full.
pub fn share_fence(key: u64) {
    sessions::open();
    let _owner = OfSubtransaction::begin();
    // SAFETY: the tag lives through the call; the lock belongs to the transaction
    unsafe {
        pg_sys::LockAcquire(
            &tag(key, FENCE_CLASS),
            pg_sys::ShareLock as pg_sys::LOCKMODE,
            false,
            false,
        );
    }
}

/// Takes the fence lock in exclusive mode if no other transaction holds it; until the (sub)transaction ends,
/// if it is not given back.
pub fn try_exclude_fence(key: u64) -> bool {
    let _owner = OfSubtransaction::begin();
    // SAFETY: as `share_fence`; with `dontWait` a conflict is an answer
    let result = unsafe {
        pg_sys::LockAcquire(
            &tag(key, FENCE_CLASS),
            pg_sys::ExclusiveLock as pg_sys::LOCKMODE,
            false,
            true,
        )
    };
    result != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
}

/// Gives the exclusive fence lock back; the share one stays.
pub fn readmit_fence(key: u64) {
    release(key, FENCE_CLASS, pg_sys::ExclusiveLock);
}

/// Gives the share one back that was taken in the same call.
pub fn leave_fence(key: u64) {
    release(key, FENCE_CLASS, pg_sys::ShareLock);
}

/// Waits for the right to reserve a block of tokens in this database.
pub fn lock_tokens() {
    lock(0, TOKENS_CLASS);
}

/// Gives that right back.
pub fn unlock_tokens() {
    release(0, TOKENS_CLASS, pg_sys::ExclusiveLock);
}

/// Waits for others that break the lease on a resource; until the (sub)transaction ends.
pub fn lock_break(key: u64) {
    lock(key, BREAK_CLASS);
}

/// Waits for the right to count a role's leases, and add one.
pub fn lock_quota(role: Oid) {
    lock(role.into(), QUOTA_CLASS);
}

/// Gives that right back.
pub fn unlock_quota(role: Oid) {
    release(role.into(), QUOTA_CLASS, pg_sys::ExclusiveLock);
}

fn lock(key: u64, class: u16) {
    let _owner = OfSubtransaction::begin();
    // SAFETY: as `share_fence`
    unsafe {
        pg_sys::LockAcquire(
            &tag(key, class),
            pg_sys::ExclusiveLock as pg_sys::LOCKMODE,
            false,
            false,
        );
    }
}

fn release(key: u64, class: u16, mode: u32) {
    let _owner = OfSubtransaction::begin();
    // SAFETY: the lock was taken by this backend under the same resource owner, in the same call
    unsafe {
        pg_sys::LockRelease(&tag(key, class), mode as pg_sys::LOCKMODE, false);
    }
}

/// The other transactions that hold the fence lock, prepared ones too.
pub fn fence_holders(key: u64) -> Vec<Holder> {
    let mut count = 0;
    // SAFETY: the result is a palloc'd array of that many
    unsafe {
        let holders = pg_sys::GetLockConflicts(
            &tag(key, FENCE_CLASS),
            pg_sys::ExclusiveLock as pg_sys::LOCKMODE,
            &mut count,
        );
        let list = std::slice::from_raw_parts(holders, usize::try_from(count).unwrap_or(0));
        let list = list.iter().map(Holder::of).collect();
        pg_sys::pfree(holders.cast());
        list
    }
}

/// The two halves of the key and the class, as `pg_locks` shows them.
pub fn fence_tag(key: u64) -> (Oid, Oid, i64) {
    ((key >> 32) as u32, key as u32, i64::from(FENCE_CLASS))
}

/// How many transactions hold the fence lock, this one included, prepared ones too.
pub fn writers(key: u64) -> i32 {
    let tag = tag(key, FENCE_CLASS);
    let mut others = 0;
    // SAFETY: the result is a palloc'd array; the count goes to a local; own locks are left out by the
    // function
    let own = unsafe {
        let holders =
            pg_sys::GetLockConflicts(&tag, pg_sys::ExclusiveLock as pg_sys::LOCKMODE, &mut others);
        pg_sys::pfree(holders.cast());
        held_by_me(&tag)
    };
    others + i32::from(own)
}

/// # Safety
/// `tag` is a valid lock tag; the lookup is in this backend's own table.
unsafe fn held_by_me(tag: &pg_sys::LOCKTAG) -> bool {
    let mode = pg_sys::ShareLock as pg_sys::LOCKMODE;
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    // SAFETY: the caller's
    return unsafe { pg_sys::LockHeldByMe(tag, mode) };
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    // SAFETY: the caller's
    return unsafe { pg_sys::LockHeldByMe(tag, mode, false) };
}
