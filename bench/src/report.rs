//! The table that a run ends with, in Markdown so that it can be pasted as it is.

use std::fmt;

use crate::memory::megabytes;

/// What a row is held against.
#[derive(Clone, Copy)]
pub enum Target {
    AtLeast(f64),
    AtMost(f64),
}

impl Target {
    fn reached(self, figure: f64) -> bool {
        match self {
            Target::AtLeast(bound) => figure >= bound,
            Target::AtMost(bound) => figure <= bound,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::AtLeast(bound) => write!(f, "at least {bound}"),
            Target::AtMost(bound) => write!(f, "at most {bound}"),
        }
    }
}

const HEAD: [&str; 7] = [
    "what",
    "leasehold",
    "against",
    "its figure",
    "ratio",
    "target",
    "reached",
];

/// The lines so far, every cell as it is printed.
#[derive(Default)]
pub struct Report {
    rows: Vec<[String; HEAD.len()]>,
}

/// A competitor and its figure, as printed.
pub struct Figure<'a> {
    pub name: &'a str,
    pub value: String,
}

/// How ours relates to the competitor's figure, and what to print behind it.
pub struct Ratio {
    pub value: f64,
    pub spread: String,
}

impl Report {
    /// A row that is judged by a ratio; without a target it is there for information.
    pub fn ratio(
        &mut self,
        what: &str,
        ours: String,
        against: Figure<'_>,
        ratio: Ratio,
        target: Option<Target>,
    ) {
        self.rows.push([
            what.into(),
            ours,
            against.name.into(),
            against.value,
            format!("{:.2}{}", ratio.value, ratio.spread),
            target.map_or(String::new(), |t| t.to_string()),
            target.map_or(String::new(), |t| yes_or_no(t.reached(ratio.value))),
        ]);
    }

    /// A row on a size in bytes and what it was at another time, in megabytes; not judged.
    pub fn size(&mut self, what: &str, now: i64, name: &str, then: i64) {
        let shown = |bytes| format!("{:.2} MB", megabytes(bytes));
        let against = Figure {
            name,
            value: shown(then),
        };
        let ratio = Ratio {
            value: now as f64 / then as f64,
            spread: String::new(),
        };
        self.ratio(what, shown(now), against, ratio, None);
    }

    /// A row that is judged by a figure of its own.
    pub fn figure(&mut self, what: &str, ours: String, target: &str, reached: bool) {
        let none = String::new;
        self.rows.push([
            what.into(),
            ours,
            none(),
            none(),
            none(),
            target.into(),
            yes_or_no(reached),
        ]);
    }

    /// A row that is not judged.
    pub fn note(&mut self, what: &str, ours: String) {
        let mut row: [String; HEAD.len()] = Default::default();
        row[0] = what.into();
        row[1] = ours;
        self.rows.push(row);
    }
}

fn yes_or_no(reached: bool) -> String {
    if reached {
        "yes".into()
    } else {
        "**no**".into()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = HEAD.map(String::from);
        let lines = || std::iter::once(&head).chain(&self.rows);
        let width = |column: usize| {
            lines()
                .map(|line| line[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: [usize; HEAD.len()] = std::array::from_fn(width);
        for (number, line) in lines().enumerate() {
            for (cell, width) in line.iter().zip(widths) {
                write!(f, "| {cell:width$} ")?;
            }
            writeln!(f, "|")?;
            if number == 0 {
                for width in widths {
                    write!(f, "|{}", "-".repeat(width + 2))?;
                }
                writeln!(f, "|")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_shows_whether_a_target_is_reached() {
        let mut report = Report::default();
        let ratio = || Ratio {
            value: 0.9,
            spread: " (0.80 to 1.00)".into(),
        };
        let against = |value: &str| Figure {
            name: "SELECT 1",
            value: value.into(),
        };
        report.ratio(
            "renew",
            "900/s".into(),
            against("1,000/s"),
            ratio(),
            Some(Target::AtLeast(0.85)),
        );
        report.ratio(
            "update",
            "90 ms".into(),
            against("100 ms"),
            ratio(),
            Some(Target::AtMost(0.85)),
        );
        report.ratio("other", "9/s".into(), against("10/s"), ratio(), None);
        report.figure("memory", "1.0 MB".into(), "under 16 MB", true);
        report.note("sweep", "9/s".into());
        let table = report.to_string();
        let reached: Vec<&str> = table
            .lines()
            .map(|line| {
                line.trim_end_matches('|')
                    .rsplit('|')
                    .next()
                    .unwrap()
                    .trim()
            })
            .collect();
        assert_eq!(
            reached,
            ["reached", "---------", "yes", "**no**", "", "yes", ""]
        );
        assert!(table.contains("| 0.90 (0.80 to 1.00) "), "{table}");
    }
}
