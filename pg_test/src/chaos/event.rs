//! What a client writes down of its work: a line before a statement is sent, and one when its answer has come, or the
//! news that none will come.
//!
//! A line is a time, a word and numbers. It is written to a pipe at once, so that what a client has heard before a
//! kill -9 is not lost.

use std::fmt;
use std::str::FromStr;

use super::clock::Micros;

/// A resource by its number; its name is `r` and the number.
pub type Resource = usize;

pub fn name(resource: Resource) -> String {
    format!("r{resource}")
}

/// A resource under a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lease {
    pub resource: Resource,
    pub token: i64,
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    Begin,
    Savepoint,
    RollbackTo,
    ReleaseSavepoint,
    Commit,
    Rollback,
    /// Answered by the token, or nothing.
    Acquire(Acquire),
    /// Answered by 1 or 0, as `Release`.
    Renew {
        lease: Lease,
        ttl: Micros,
    },
    Release {
        lease: Lease,
    },
    /// A fenced write under each lease, in a transaction block. Answered by the number that each got among the writes
    /// of its resource.
    Write {
        id: i64,
        leases: Vec<Lease>,
    },
    /// `fence`, in a transaction block.
    Fence {
        lease: Lease,
    },
    /// Reads how many writes a resource has had.
    See {
        lease: Lease,
    },
    /// As an administrator. Answered by the token whose lease it ends, or nothing.
    Break {
        resource: Resource,
    },
}

/// What an acquire asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Acquire {
    pub resource: Resource,
    pub ttl: Micros,
    pub durable: bool,
    /// 0 for one that does not wait.
    pub wait: Micros,
    /// What the client calls it: the same again is a retry. None of two clients have one in common.
    pub request: Option<i64>,
    /// By `CALL await_lease`.
    pub called: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A session is open, by the backend of this pid.
    Connected(i32),
    Asked(Op),
    Answered(Vec<i64>),
    /// What was asked for last ended in an error; the session goes on.
    Refused {
        sqlstate: String,
        message: String,
    },
    /// The connection is gone.
    Lost {
        sqlstate: String,
    },
    /// The client is gone: what it asked for last and was not answered it will not hear of.
    Ended,
}

/// In place of an SQLSTATE: the client did not wait for the answer. The session goes on without it for a while.
pub const ABANDONED: &str = "abandoned";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamped {
    pub at: Micros,
    pub event: Event,
}

impl fmt::Display for Stamped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.at)?;
        match &self.event {
            Event::Connected(pid) => write!(f, "connected {pid}"),
            Event::Asked(op) => op.fmt(f),
            Event::Answered(numbers) => {
                f.write_str("answered")?;
                numbers.iter().try_for_each(|number| write!(f, " {number}"))
            }
            Event::Refused { sqlstate, message } => {
                write!(f, "refused {sqlstate} {}", message.replace('\n', " "))
            }
            Event::Lost { sqlstate } => write!(f, "lost {sqlstate}"),
            Event::Ended => f.write_str("ended"),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin => f.write_str("begin"),
            Self::Savepoint => f.write_str("savepoint"),
            Self::RollbackTo => f.write_str("rollback_to"),
            Self::ReleaseSavepoint => f.write_str("release_savepoint"),
            Self::Commit => f.write_str("commit"),
            Self::Rollback => f.write_str("rollback"),
            Self::Acquire(a) => write!(
                f,
                "acquire {} {} {} {} {} {}",
                a.resource,
                a.ttl,
                i32::from(a.durable),
                a.wait,
                a.request.unwrap_or(0),
                i32::from(a.called)
            ),
            Self::Renew { lease, ttl } => write!(f, "renew {lease} {ttl}"),
            Self::Release { lease } => write!(f, "release {lease}"),
            Self::Write { id, leases } => {
                write!(f, "write {id}")?;
                leases.iter().try_for_each(|lease| write!(f, " {lease}"))
            }
            Self::Fence { lease } => write!(f, "fence {lease}"),
            Self::See { lease } => write!(f, "see {lease}"),
            Self::Break { resource } => write!(f, "break {resource}"),
        }
    }
}

impl fmt::Display for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.resource, self.token)
    }
}

impl FromStr for Stamped {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        read(line).ok_or_else(|| format!("not a line of a client: {line}"))
    }
}

fn read(line: &str) -> Option<Stamped> {
    let (at, rest) = line.split_once(' ')?;
    let (word, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    let event = match word {
        "connected" => Event::Connected(rest.parse().ok()?),
        "answered" => Event::Answered(numbers(rest)?),
        "lost" => Event::Lost {
            sqlstate: rest.to_owned(),
        },
        "ended" => Event::Ended,
        "refused" => {
            let (sqlstate, message) = rest.split_once(' ').unwrap_or((rest, ""));
            Event::Refused {
                sqlstate: sqlstate.to_owned(),
                message: message.to_owned(),
            }
        }
        _ => Event::Asked(read_op(word, &numbers(rest)?)?),
    };
    Some(Stamped {
        at: at.parse().ok()?,
        event,
    })
}

fn numbers(text: &str) -> Option<Vec<i64>> {
    text.split_whitespace()
        .map(|word| word.parse().ok())
        .collect()
}

fn read_op(word: &str, numbers: &[i64]) -> Option<Op> {
    let lease = |resource: i64, token: i64| {
        let resource = usize::try_from(resource).ok()?;
        Some(Lease { resource, token })
    };
    Some(match (word, numbers) {
        ("begin", []) => Op::Begin,
        ("savepoint", []) => Op::Savepoint,
        ("rollback_to", []) => Op::RollbackTo,
        ("release_savepoint", []) => Op::ReleaseSavepoint,
        ("commit", []) => Op::Commit,
        ("rollback", []) => Op::Rollback,
        ("acquire", [resource, ttl, durable, wait, request, called]) => Op::Acquire(Acquire {
            resource: usize::try_from(*resource).ok()?,
            ttl: *ttl,
            durable: *durable == 1,
            wait: *wait,
            request: (*request != 0).then_some(*request),
            called: *called == 1,
        }),
        ("renew", [resource, token, ttl]) => Op::Renew {
            lease: lease(*resource, *token)?,
            ttl: *ttl,
        },
        ("release", [resource, token]) => Op::Release {
            lease: lease(*resource, *token)?,
        },
        ("write", [id, leases @ ..]) => Op::Write {
            id: *id,
            leases: leases
                .chunks(2)
                .map(|pair| lease(*pair.first()?, *pair.get(1)?))
                .collect::<Option<_>>()?,
        },
        ("fence", [resource, token]) => Op::Fence {
            lease: lease(*resource, *token)?,
        },
        ("see", [resource, token]) => Op::See {
            lease: lease(*resource, *token)?,
        },
        ("break", [resource]) => Op::Break {
            resource: usize::try_from(*resource).ok()?,
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let lease = Lease {
            resource: 3,
            token: 1 << 50,
        };
        let other = Lease {
            resource: 0,
            token: 7,
        };
        let ops = [
            Op::Begin,
            Op::Savepoint,
            Op::RollbackTo,
            Op::ReleaseSavepoint,
            Op::Commit,
            Op::Rollback,
            Op::Acquire(Acquire {
                resource: 2,
                ttl: 100,
                durable: false,
                wait: 0,
                request: None,
                called: true,
            }),
            Op::Acquire(Acquire {
                resource: 0,
                ttl: 1,
                durable: true,
                wait: 1 << 40,
                request: Some(7),
                called: false,
            }),
            Op::Renew { lease, ttl: 5 },
            Op::Release { lease },
            Op::Write {
                id: 12,
                leases: vec![lease, other],
            },
            Op::Fence { lease },
            Op::See { lease },
            Op::Break { resource: 3 },
        ];
        let mut events: Vec<Event> = ops.into_iter().map(Event::Asked).collect();
        events.extend([
            Event::Connected(4711),
            Event::Answered(vec![]),
            Event::Answered(vec![-1, 1 << 60]),
            Event::Refused {
                sqlstate: "LH001".to_owned(),
                message: "stale token for resource \"r3\"".to_owned(),
            },
            Event::Lost {
                sqlstate: "08006".to_owned(),
            },
            Event::Ended,
        ]);
        for (at, event) in (0..).zip(events) {
            let stamped = Stamped { at, event };
            assert_eq!(stamped.to_string().parse(), Ok(stamped));
        }
    }

    #[test]
    fn torn_line_is_no_line() {
        for line in [
            "",
            "12",
            "12 acquire 1",
            "12 acquire 1 100 1",
            "12 renew 1 2",
            "12 write",
            "12 write 1 2",
            "x begin",
            "12 connected",
        ] {
            line.parse::<Stamped>()
                .expect_err(&format!("{line} was read"));
        }
    }
}
