//! Layer readme: what README.md shows is what happens.
//!
//! Two kinds of fenced blocks are run, in the order of the document, by real psql sessions on one fresh server:
//!
//! - ```` ```console ````: a transcript. A line `alice=> SELECT 1;` is typed into the session alice (any name; each
//!   name is a psql of its own, which lives to the end of the document), `alice-> ` continues the statement, and
//!   the lines up to the next prompt are its output. Console blocks without a psql prompt are the shell's, and left.
//! - ```` ```sql ````: typed into the session `sql`. A ```` ```text ```` block that follows directly is its output;
//!   without one it only must not fail.
//!
//! Output is compared line by line after blanks and rulers have been squeezed. What differs from run to run:
//! numbers of nine digits or more are tokens, and each stands for the token that the run gives in its place, in
//! later statements too; a greater one must stand for a greater one. Dates and times of day match any other. `...`
//! matches anything within a line.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::Arc;

use crate::cluster::{Cluster, Db};
use crate::environment::environment;
use crate::watchdog;

crate::tests![
    readme_shows_what_happens,
    differing_output_is_noticed,
    sessions_and_tokens_are_told_apart
];

fn readme_shows_what_happens() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    let text =
        fs::read_to_string(&path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
    let count = run(&text).unwrap_or_else(|e| panic!("README.md {e}"));
    assert!(count > 0, "README.md has no block that could be run");
}

/// One thing typed, and what must come back; None: anything but an error.
#[derive(Debug, PartialEq)]
struct Step {
    line: usize,
    session: String,
    input: String,
    output: Option<Vec<String>>,
}

/// Runs all blocks of a document; gives their steps' number, or the first difference.
fn run(text: &str) -> Result<usize, String> {
    let steps = parse(text)?;
    let db = Db::bare_on(&Arc::new(Cluster::builder().start()));
    let mut sessions: BTreeMap<&str, Psql> = BTreeMap::new();
    let mut tokens = Tokens::default();
    for step in &steps {
        let psql = sessions
            .entry(&step.session)
            .or_insert_with(|| Psql::start(&db));
        let actual = psql.say(&tokens.actual_of(&step.input));
        let compared = match &step.output {
            Some(expected) => tokens.compare(expected, &actual),
            None if actual.iter().any(|line| line.starts_with("ERROR:")) => {
                Err("it fails".to_owned())
            }
            None => Ok(()),
        };
        compared
            .and_then(|()| tokens.in_order())
            .map_err(|difference| {
                let shown = step.output.as_deref().unwrap_or_default().join("\n");
                format!(
                    "line {}: {difference}\n{}\n-- shown:\n{shown}\n-- got:\n{}",
                    step.line,
                    step.input,
                    actual.join("\n")
                )
            })?;
    }
    Ok(steps.len())
}

/// The steps of a document.
fn parse(text: &str) -> Result<Vec<Step>, String> {
    let mut steps: Vec<Step> = Vec::new();
    let mut lines = text.lines().enumerate();
    // where a text block would be the output of the last step
    let mut wants_output = false;
    while let Some((number, line)) = lines.next() {
        let Some(language) = line.trim_start().strip_prefix("```") else {
            wants_output &= line.trim().is_empty();
            continue;
        };
        let body: Vec<(usize, &str)> = lines
            .by_ref()
            .take_while(|(_, l)| !l.trim_start().starts_with("```"))
            .collect();
        match language.trim() {
            "console" => steps.extend(transcript(&body)?),
            "sql" => steps.push(Step {
                line: number + 2,
                session: "sql".to_owned(),
                input: body.iter().map(|(_, l)| *l).collect::<Vec<_>>().join("\n"),
                output: None,
            }),
            "text" if wants_output => {
                let step = steps.last_mut().expect("a step wants its output");
                step.output = Some(body.iter().map(|(_, l)| (*l).to_owned()).collect());
            }
            _ => {}
        }
        wants_output = language.trim() == "sql";
    }
    Ok(steps)
}

fn transcript(body: &[(usize, &str)]) -> Result<Vec<Step>, String> {
    let mut steps: Vec<Step> = Vec::new();
    for (number, line) in body {
        let line_number = number + 1;
        match (prompt(line), steps.last_mut()) {
            (Some((session, true, input)), _) => steps.push(Step {
                line: line_number,
                session: session.to_owned(),
                input: input.to_owned(),
                output: Some(Vec::new()),
            }),
            (Some((session, false, input)), Some(step)) if step.session == session => {
                step.input = format!("{}\n{input}", step.input);
            }
            (Some(_), _) => {
                return Err(format!(
                    "line {line_number}: continues a statement that is not there"
                ));
            }
            (None, Some(step)) => step.output.get_or_insert_default().push((*line).to_owned()),
            // a shell's block, or its part before the first prompt
            (None, None) => {}
        }
    }
    Ok(steps)
}

/// Session, whether a statement starts here, and what is typed.
fn prompt(line: &str) -> Option<(&str, bool, &str)> {
    let length = line
        .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|length| *length > 0)?;
    let (session, rest) = line.split_at(length);
    let starts = match rest.chars().next()? {
        '=' => true,
        '-' => false,
        _ => return None,
    };
    // psql marks an open transaction by a star, a failed one by an exclamation mark
    let rest = rest[1..].trim_start_matches(['*', '!']);
    let input = rest.strip_prefix(['>', '#'])?;
    (input.is_empty() || input.starts_with(' ')).then(|| (session, starts, input.trim_start()))
}

/// A psql session, driven through pipes; what it says on standard error comes in between, as on a terminal.
struct Psql {
    process: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

impl Psql {
    fn start(db: &Db) -> Self {
        let _starting = watchdog::starting();
        let psql = environment().bindir.join("psql");
        let mut command = environment().command("sh", db.cluster.dir());
        command.args(["-c", "exec \"$@\" 2>&1", "sh"]).arg(psql);
        command.args([
            "-X",
            "--no-readline",
            "-P",
            "pager=off",
            "-U",
            "postgres",
            "-h",
        ]);
        command
            .arg(db.cluster.socket_dir())
            .args(["-p", "5432", &db.name]);
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("psql can be started");
        let input = process.stdin.take().expect("a pipe");
        let output = BufReader::new(process.stdout.take().expect("a pipe"));
        Self {
            process,
            input,
            output,
        }
    }

    /// Types a statement and waits for all that it prints.
    fn say(&mut self, statement: &str) -> Vec<String> {
        const END: &str = "~~ end of output ~~";
        writeln!(self.input, "{statement}\n\\echo '{END}'").expect("psql listens");
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            let length = self
                .output
                .read_line(&mut line)
                .expect("psql's output can be read");
            assert!(length > 0, "psql has ended: {}", lines.join("\n"));
            match line.trim_end() {
                END => return lines,
                line => lines.push(line.to_owned()),
            }
        }
    }
}

impl Drop for Psql {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Which token of this run each token of the document stands for.
#[derive(Default)]
struct Tokens(BTreeMap<i64, i64>);

impl Tokens {
    /// The text with this run's tokens in place of the document's.
    fn actual_of(&self, text: &str) -> String {
        replace_tokens(text, |token| *self.0.get(&token).unwrap_or(&token))
    }

    fn compare(&mut self, expected: &[String], actual: &[String]) -> Result<(), String> {
        let (expected, actual) = (squeezed(expected), squeezed(actual));
        for (shown, got) in expected.iter().zip(&actual) {
            if !self.line_matches(shown, got) {
                return Err(format!("this line differs:\n   {shown}\n   {got}"));
            }
        }
        match expected.len() == actual.len() {
            true => Ok(()),
            false => Err(format!(
                "{} lines are shown, {} come",
                expected.len(),
                actual.len()
            )),
        }
    }

    fn line_matches(&mut self, shown: &str, got: &str) -> bool {
        let (theirs, ours) = (tokens_of(shown), tokens_of(got));
        if theirs.len() == ours.len() {
            theirs.iter().zip(&ours).for_each(|(their, our)| {
                self.0.entry(*their).or_insert(*our);
            });
        }
        glob_matches(&self.actual_of(shown), got)
    }

    fn in_order(&self) -> Result<(), String> {
        let values: Vec<i64> = self.0.values().copied().collect();
        match values.is_sorted_by(|a, b| a < b) {
            true => Ok(()),
            false => Err(format!("the tokens come in another order: {:?}", self.0)),
        }
    }
}

/// Lines without what only depends on widths and clocks: runs of blanks, rulers, dates, times; nor blank ones at the
/// end.
fn squeezed(lines: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = lines.iter().map(|line| squeezed_line(line)).collect();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines
}

fn squeezed_line(line: &str) -> String {
    let words: Vec<String> = line.split_whitespace().map(squeezed_word).collect();
    words.join(" ")
}

fn squeezed_word(word: &str) -> String {
    let is_ruler =
        word.len() > 1 && word.contains("--") && word.chars().all(|c| matches!(c, '-' | '+'));
    if is_ruler {
        return word.split('+').map(|_| "-").collect::<Vec<_>>().join("+");
    }
    // digits in groups joined by colons or dashes: a time of day, an interval, a date
    let core = word.trim_matches(|c: char| matches!(c, '(' | ')' | ',' | '\'' | '"' | ';' | '.'));
    for (separator, groups, name) in [(':', 3, "TIME"), ('-', 3, "DATE")] {
        let parts: Vec<&str> = core.split(separator).collect();
        let clock = |c: char| c.is_ascii_digit() || matches!(c, '.' | '+');
        if parts.len() == groups
            && parts
                .iter()
                .all(|part| !part.is_empty() && part.chars().all(clock))
        {
            return word.replace(core, name);
        }
    }
    word.to_owned()
}

/// Replaces numbers of nine digits or more that stand for themselves.
fn replace_tokens(text: &str, mut replace: impl FnMut(i64) -> i64) -> String {
    let mut result = String::new();
    let mut rest = text;
    let mut before = ' ';
    while let Some(c) = rest.chars().next() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        let length = if digits > 0 { digits } else { c.len_utf8() };
        let (word, tail) = rest.split_at(length);
        let alone = !before.is_alphanumeric() && !tail.starts_with(|c: char| c.is_alphanumeric());
        match word.parse().ok().filter(|_| digits >= 9 && alone) {
            Some(token) => result.push_str(&replace(token).to_string()),
            None => result.push_str(word),
        }
        before = word.chars().next_back().unwrap_or(' ');
        rest = tail;
    }
    result
}

fn tokens_of(text: &str) -> Vec<i64> {
    let mut tokens = Vec::new();
    replace_tokens(text, |token| {
        tokens.push(token);
        token
    });
    tokens
}

/// Whether a text matches a pattern in which `...` stands for anything.
fn glob_matches(pattern: &str, text: &str) -> bool {
    let Some((head, tail)) = pattern.split_once("...") else {
        return pattern == text;
    };
    let Some(rest) = text.strip_prefix(head) else {
        return false;
    };
    rest.char_indices()
        .map(|(i, _)| i)
        .chain([rest.len()])
        .any(|i| glob_matches(tail, &rest[i..]))
}

/// A document in small, with every kind of block.
const SAMPLE: &str = "\
```sh
make demo
```
```console
$ psql
```
```sql
CREATE EXTENSION leasehold;
CREATE TABLE t (id int);
```
and then
```sql
SELECT fence_table('t', 't:{id}');
SELECT 1 AS one;
```

```text
 fence_table
-------------

(1 row)

 one
-----
   1
(1 row)

```
```console
alice=> SELECT acquire_lease('t:1',
alice->     ttl => '1 microsecond') AS token;
    token
--------------
 100000000001
(1 row)

bob=> SELECT acquire_lease('t:1') AS token;
    token
--------------
 100000000002
(1 row)

bob=> BEGIN;
BEGIN
bob=*> SET LOCAL leasehold.token = '100000000002';
SET
bob=*> INSERT INTO t VALUES (1);
INSERT 0 1
bob=*> COMMIT;
COMMIT
bob=> SELECT token, ttl, granted_at, ... AS x
bob-> FROM lease_info('t:1');
ERROR:  syntax error at or near \"..\"
LINE 1: ...
        ...
alice=> SELECT token, ttl FROM lease_info('t:1');
    token     |   ttl
--------------+----------
 100000000002 | 00:00:30
(1 row)

alice=> \\set VERBOSITY sqlstate
alice=> SELECT fence('t:1', 100000000001);
ERROR:  LH001
```
";

fn sessions_and_tokens_are_told_apart() {
    assert_eq!(run(SAMPLE), Ok(12));
}

fn differing_output_is_noticed() {
    // each change makes the document show what does not happen
    let changes = [
        ("   1\n", "   2\n"),
        (" one\n", " two\n"),
        ("LH001", "LH002"),
        ("INSERT 0 1", "INSERT 0 2"),
        (" 100000000002 | 00:00:30", " 100000000001 | 00:00:30"),
        (
            "token\n--------------\n 100000000002",
            "token\n--------------\n 100000000000",
        ),
        ("fence('t:1', 100000000001)", "fence('t:1', 100000000002)"),
        ("CREATE TABLE t (id int);", "CREATE TABLE t (id nonsense);"),
        ("COMMIT\nbob", "COMMIT\nand more\nbob"),
    ];
    for (from, to) in changes {
        assert!(SAMPLE.contains(from), "{from}");
        run(&SAMPLE.replacen(from, to, 1)).expect_err(&format!("{to} for {from} goes unnoticed"));
    }
    run("```console\nalice-> SELECT 1;\n```\n").expect_err("a continuation of nothing");
}
