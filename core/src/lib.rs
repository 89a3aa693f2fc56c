//! The pure part of leasehold: what a lease is and which token is good, without PostgreSQL.
//!
//! **Nothing here reads a clock, sleeps, allocates shared memory or knows pgrx.** Time, names and
//! positions come in as arguments and decisions go out as values, so every guarantee that rests on
//! this code is shown by property tests and a model checker that need no server.
//!
//! Durations are microseconds in an `i64`. Tokens are `i64` above zero; zero stands for "none".

pub mod histogram;
pub mod name;
pub mod queue;
pub mod record;
pub mod rights;
pub mod template;
pub mod token;
pub mod ttl;
