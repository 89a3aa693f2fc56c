//! The settings, with their getters. Durations are microseconds here and milliseconds in the GUCs.
//!
//! The presented tokens of `leasehold.token` are parsed once per assignment.

use std::cell::Cell;
use std::ffi::CString;

use leasehold_core::token::{TokenList, parse_list};
use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting, PostgresGucEnum};

use crate::pg;

static MAX_LEASES: GucSetting<i32> = GucSetting::<i32>::new(16_384);
static DEFAULT_TTL_MS: GucSetting<i32> = GucSetting::<i32>::new(30_000);
static MAX_TTL_MS: GucSetting<i32> = GucSetting::<i32>::new(300_000);
static TOKEN: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

static PROMOTION: GucSetting<Promotion> = GucSetting::<Promotion>::new(Promotion::Lossy);
static DURABILITY: GucSetting<Durability> = GucSetting::<Durability>::new(Durability::Durable);
static ZOMBIE_POLICY: GucSetting<ZombiePolicy> =
    GucSetting::<ZombiePolicy>::new(ZombiePolicy::Terminate);
static ZOMBIE_GRACE_MS: GucSetting<i32> = GucSetting::<i32>::new(1_000);
static MAX_WAITERS: GucSetting<i32> = GucSetting::<i32>::new(64);
static MAX_WAIT_MS: GucSetting<i32> = GucSetting::<i32>::new(60_000);
static EVENT_RING: GucSetting<i32> = GucSetting::<i32>::new(4096);
static LOG_EVENTS: GucSetting<bool> = GucSetting::<bool>::new(false);
static NOTIFY_CHANNEL: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));
static MAX_LEASES_PER_ROLE: GucSetting<i32> = GucSetting::<i32>::new(0);
static LEDGER_RETENTION_S: GucSetting<i32> = GucSetting::<i32>::new(7 * 24 * 3600);

/// `leasehold.promotion`
#[derive(Clone, Copy, Debug, PartialEq, Eq, PostgresGucEnum)]
pub enum Promotion {
    /// A promoted server may lack the last grants.
    #[name = c"lossy"]
    Lossy,
    /// Only servers that have every grant are promoted.
    #[name = c"lossless"]
    Lossless,
}

/// `leasehold.durability`
#[derive(Clone, Copy, Debug, PartialEq, Eq, PostgresGucEnum)]
pub enum Durability {
    /// In the ledger before the client hears of it.
    #[name = c"durable"]
    Durable,
    /// In shared memory only.
    #[name = c"memory"]
    Memory,
}

/// `leasehold.zombie_policy`
#[derive(Clone, Copy, Debug, PartialEq, Eq, PostgresGucEnum)]
pub enum ZombiePolicy {
    /// Zombies are waited for.
    #[name = c"wait"]
    Wait,
    /// A statement in progress is cancelled.
    #[name = c"cancel"]
    Cancel,
    /// A statement in progress is cancelled, an idle transaction's session ended.
    #[name = c"terminate"]
    Terminate,
}

/// What a promoted server believes of its ledger.
pub fn promotion() -> Promotion {
    PROMOTION.get()
}

/// Whether this session's leases are durable.
pub fn is_durable() -> bool {
    DURABILITY.get() == Durability::Durable
}

/// What a taker may do to a zombie.
pub fn zombie_policy() -> ZombiePolicy {
    ZOMBIE_POLICY.get()
}

/// How long past the end of its lease a zombie is left alone.
pub fn zombie_grace_us() -> i64 {
    i64::from(ZOMBIE_GRACE_MS.get()) * 1000
}

/// How many may wait for one resource.
pub fn max_waiters() -> u32 {
    u32::try_from(MAX_WAITERS.get()).unwrap_or(0)
}

/// The longest wait of `acquire_lease`.
pub fn max_wait_us() -> i64 {
    i64::from(MAX_WAIT_MS.get()) * 1000
}

/// How many events are kept.
pub fn event_ring() -> usize {
    usize::try_from(EVENT_RING.get()).unwrap_or(0)
}

/// Whether events are written to the server log.
pub fn log_events() -> bool {
    LOG_EVENTS.get()
}

/// The channel on which each database tells of its events; None for none.
pub fn notify_channel() -> Option<Vec<u8>> {
    let channel = NOTIFY_CHANNEL.get()?.into_bytes();
    (!channel.is_empty()).then_some(channel)
}

/// How many live leases a role may hold; 0 for any number.
pub fn max_leases_per_role() -> u32 {
    u32::try_from(MAX_LEASES_PER_ROLE.get()).unwrap_or(0)
}

/// How long an unused row of the ledger is kept.
pub fn ledger_retention_us() -> i64 {
    i64::from(LEDGER_RETENTION_S.get()) * 1_000_000
}

/// More than this many leases need more memory than the lock table could ever fence.
const MAX_LEASES_LIMIT: i32 = 1_000_000;

/// Live leases that always fit the shared table.
pub fn max_leases() -> usize {
    usize::try_from(MAX_LEASES.get()).unwrap_or(1)
}

/// TTL when none is given; `max_ttl` where the default is above it.
pub fn default_ttl_us() -> i64 {
    (i64::from(DEFAULT_TTL_MS.get()) * 1000).min(max_ttl_us())
}

/// Longest TTL allowed.
pub fn max_ttl_us() -> i64 {
    i64::from(MAX_TTL_MS.get()) * 1000
}

thread_local! {
    static PRESENTED: Cell<Option<TokenList>> = const { Cell::new(None) };
}

/// The tokens that the session presents by `leasehold.token`.
pub fn presented() -> TokenList {
    if let Some(list) = PRESENTED.get() {
        return list;
    }
    let text = TOKEN.get().unwrap_or_default();
    // the check hook has refused everything that does not parse
    let list = parse_list(text.to_str().unwrap_or_default()).unwrap_or_default();
    PRESENTED.set(Some(list));
    list
}

/// Says why a value of `leasehold.token` is refused, or nothing.
pub fn token_list_error(text: &str) -> Option<String> {
    parse_list(text).err().map(|e| format!("{e}"))
}

/// `leasehold.token` has a new value.
pub fn token_assigned() {
    PRESENTED.set(None);
    crate::xact::invalidate();
}

/// Defines the settings. Only while preloading.
pub fn define() {
    GucRegistry::define_int_guc(
        c"leasehold.max_leases",
        c"Live leases that always fit the shared table.",
        c"Half as many more may. Memory: about 800 bytes each, taken at server start.",
        &MAX_LEASES,
        1,
        MAX_LEASES_LIMIT,
        GucContext::Postmaster,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"leasehold.default_ttl",
        c"TTL of a lease when none is given.",
        c"Acts as leasehold.max_ttl where it is above it.",
        &DEFAULT_TTL_MS,
        1,
        i32::MAX,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"leasehold.max_ttl",
        c"Longest TTL allowed.",
        c"Also how long nothing is granted after a promotion. The same on all servers.",
        &MAX_TTL_MS,
        1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_enum_guc(
        c"leasehold.promotion",
        c"What a promoted server believes of the leases that it knows.",
        c"lossy: nothing, and it grants none for leasehold.max_ttl. lossless: all; only servers that have every grant are promoted.",
        &PROMOTION,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_enum_guc(
        c"leasehold.durability",
        c"Whether the leases that this session acquires survive the server.",
        c"memory: no disk write; lost with the server, after which nothing is granted until they would have run out.",
        &DURABILITY,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_enum_guc(
        c"leasehold.zombie_policy",
        c"What a taker may do to a transaction that is still open under a lease that is over.",
        c"wait: nothing. cancel: cancel its statement. terminate: also end its session where it is idle.",
        &ZOMBIE_POLICY,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"leasehold.zombie_grace",
        c"How long past the end of its lease such a transaction is left alone.",
        c"",
        &ZOMBIE_GRACE_MS,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"leasehold.max_waiters",
        c"Waiters for one resource.",
        c"One more is refused at once.",
        &MAX_WAITERS,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"leasehold.max_wait",
        c"Longest wait of acquire_lease().",
        c"It holds a snapshot while it waits; CALL await_lease() does not, and has no limit.",
        &MAX_WAIT_MS,
        0,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"leasehold.event_ring",
        c"Events that are kept in shared memory.",
        c"0: none.",
        &EVENT_RING,
        0,
        1_000_000,
        GucContext::Postmaster,
        GucFlags::default(),
    );
    GucRegistry::define_bool_guc(
        c"leasehold.log_events",
        c"Whether events are written to the server log.",
        c"By the worker, within a second.",
        &LOG_EVENTS,
        GucContext::Sighup,
        GucFlags::default(),
    );
    pg::guc::define_channel_setting(&NOTIFY_CHANNEL);
    GucRegistry::define_int_guc(
        c"leasehold.max_leases_per_role",
        c"Live leases that a role may hold in a database.",
        c"0: any number.",
        &MAX_LEASES_PER_ROLE,
        0,
        i32::MAX,
        GucContext::Suset,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"leasehold.ledger_retention",
        c"How long an unused row of the ledger is kept.",
        c"",
        &LEDGER_RETENTION_S,
        1,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    pg::guc::define_token_setting(&TOKEN);
    pg::guc::reserve_prefix();
}
