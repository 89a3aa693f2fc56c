//! Templates, names and durations keep what they are given, and no text or number makes them panic.
#![allow(clippy::unwrap_used, clippy::arithmetic_side_effects)]

use leasehold_core::name::{HOLDER_BYTES_MAX, default_holder, hash};
use leasehold_core::template::{Piece, Template, TemplateError, escape};
use leasehold_core::ttl::{self, TtlError};
use proptest::prelude::*;

/// Pieces as a parsed template has them: texts not empty and never side by side.
fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let piece = prop_oneof![
        "\\PC{1,6}|[{}]{1,3}".prop_map(Piece::Text),
        "[^{}]{1,6}".prop_map(Piece::Column),
    ];
    prop::collection::vec(piece, 1..8).prop_map(|mut pieces| {
        pieces.dedup_by(|a, b| matches!((a, b), (Piece::Text(_), Piece::Text(_))));
        pieces
    })
}

fn written(pieces: &[Piece]) -> String {
    let write = |piece: &Piece| match piece {
        Piece::Text(text) => escape(text),
        Piece::Column(name) => format!("{{{name}}}"),
    };
    pieces.iter().map(write).collect()
}

/// Text that is full of braces.
fn braces() -> impl Strategy<Value = String> {
    prop_oneof!["[{}ab]{0,12}", "[{}é ]{0,12}", any::<String>()]
}

proptest! {
    #[test]
    fn a_template_reads_back(pieces in pieces()) {
        let template = Template::parse(&written(&pieces)).unwrap();
        prop_assert_eq!(template.pieces(), pieces);
    }

    #[test]
    fn an_escaped_text_is_a_constant(text in braces()) {
        match Template::parse(&escape(&text)) {
            Ok(template) => prop_assert_eq!(template.constant(), Some(text.as_str())),
            Err(e) => prop_assert_eq!((e, text.as_str()), (TemplateError::Empty, "")),
        }
    }

    #[test]
    fn what_parses_is_written_back_the_same(text in braces()) {
        if let Ok(template) = Template::parse(&text) {
            prop_assert_eq!(written(template.pieces()), text);
            let constant = template.constant().is_some();
            prop_assert_eq!(constant, template.columns().next().is_none());
        }
    }

    #[test]
    fn what_does_not_parse_has_its_brace_where_the_error_says(text in braces()) {
        let byte = |at: usize| text.as_bytes().get(at - 1).copied();
        match Template::parse(&text) {
            Ok(_) => {}
            Err(TemplateError::Empty) => prop_assert_eq!(text, ""),
            Err(TemplateError::Unclosed(at) | TemplateError::NoName(at)) => {
                prop_assert_eq!(byte(at), Some(b'{'));
            }
            Err(TemplateError::Stray(at)) => prop_assert_eq!(byte(at), Some(b'}')),
        }
    }

    #[test]
    fn a_default_holder_fits_and_ends_with_its_pid(
        user in any::<String>(),
        application in "\\PC{0,200}",
        pid: i32,
    ) {
        let label = default_holder(&user, &application, pid);
        let end = format!("/{pid}");
        prop_assert!(label.len() <= HOLDER_BYTES_MAX);
        prop_assert!(label.ends_with(&end));
        // what stands before the pid is the beginning of what it is made of, and cut only if needed
        let full = match application.as_str() {
            "" => user,
            application => format!("{user}/{application}"),
        };
        let kept = label.strip_suffix(&end).unwrap();
        prop_assert!(full.starts_with(kept));
        let next = full.get(kept.len()..).unwrap().chars().next();
        prop_assert!(next.is_none_or(|c| label.len() + c.len_utf8() > HOLDER_BYTES_MAX));
    }

    #[test]
    fn the_hash_depends_on_every_byte(
        resource in prop::collection::vec(any::<u8>(), 1..=255),
        at: prop::sample::Index,
        flip in 1..=255_u8,
    ) {
        let mut other = resource.clone();
        *other.get_mut(at.index(resource.len())).unwrap() ^= flip;
        prop_assert_ne!(hash(&resource), hash(&other));
    }

    #[test]
    fn a_ttl_is_allowed_exactly_between_zero_and_the_longest(
        months: i32,
        days: i32,
        us: i64,
        max in 1..=i64::MAX,
    ) {
        let total = ttl::interval_us(months, days, us);
        let hours = (i128::from(months) * 30 + i128::from(days)) * 24;
        prop_assert_eq!(total, hours * 3_600_000_000 + i128::from(us));
        let want = match total {
            ..=0 => Err(TtlError::NotPositive),
            us if us > i128::from(max) => Err(TtlError::AboveMax),
            us => Ok(i64::try_from(us).unwrap()),
        };
        prop_assert_eq!(ttl::check(total, max), want);
    }
}
