//! `fenced()`, the row trigger: which resource a row belongs to, and what is presented for it.
//!
//! Most specific first: an own acquire or `fence()` for this resource, the setting, the row's token
//! column. What is presented may pass the fence once; after that a row costs a comparison.
//!
//! The token column only counts in an INSERT, or in an UPDATE that sets it: an unchanged one holds the
//! last writer's token, which proves nothing.

use leasehold_core::name;
use leasehold_core::template::{Piece, Template};

use crate::errors::{self, Answer, Refusal, code};
use crate::fence::{self, Presented};
use crate::pg::Oid;
use crate::pg::fmgr::{Call, Value};
use crate::pg::trigger::{self, Column, ColumnError, Event, Firing, Side};
use crate::resources::{self, Resource};
use crate::xact::{self, Checked};
use crate::{api, ledger, pg, settings, sql_function};

sql_function!(leasehold_fenced, pg_finfo_leasehold_fenced, fenced);

/// A resource template in the server's encoding.
pub struct Resources {
    template: Template,
    is_utf8: bool,
}

/// The first argument and the further ones of the trigger, read.
pub struct Arguments {
    /// The resource.
    pub resources: Resources,
    /// The column that presents and is stamped.
    pub token_column: Option<Vec<u8>>,
    /// An expired lease is over even if nobody wants the resource.
    pub strict: bool,
}

/// What a statement's firings share: the arguments against the relation as it is now.
struct Plan {
    parts: Vec<Part>,
    /// The resource of every row, where the template has no columns.
    constant: Option<Resource>,
    ledger: Oid,
    token_column: Option<i16>,
    strict: bool,
    relation: String,
    /// The state in which the constant resource was last found good, with its token.
    passed: Option<Passed>,
    /// The same for a resource of one plain column, by the column's value; empty where there is no
    /// such column, or where every row must be looked at. Collisions only cost.
    passed_values: Vec<Option<(usize, Passed)>>,
    /// The row of the last UPDATE.
    leaving: Option<Leaving>,
    old_name: Vec<u8>,
    new_name: Vec<u8>,
}

/// A row whose UPDATE has passed. If it goes to another partition, a DELETE follows, which has no new
/// row to present anything: it is part of what has passed. The plan is of one run of one statement,
/// which does not come back to a row for another reason.
#[derive(Clone, Copy)]
struct Leaving {
    /// Block and offset of the old row.
    place: (u32, u16),
    /// What the UPDATE passed with, for the resource that the row leaves.
    token: i64,
}

impl Leaving {
    /// Whether it is the row of this firing.
    fn is(&self, firing: &Firing) -> bool {
        self.place == firing.old_place()
    }
}

/// The state in which something was found good.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Passed {
    epoch: u64,
    users: (Oid, Oid),
}

impl Passed {
    /// The state now.
    fn now() -> Passed {
        Passed {
            epoch: xact::epoch(),
            users: (pg::current_user(), pg::session_user()),
        }
    }
}

/// How many values of a resource's column a statement remembers: a power of two.
const VALUES: usize = 256;

enum Part {
    Text(Vec<u8>),
    Column(Box<Column>),
}

/// fenced() RETURNS trigger
fn fenced(call: &Call) -> Answer<Value> {
    let Some(firing) = Firing::of(call) else {
        return Err(Refusal::new(
            code::TRIGGER_PROTOCOL,
            "fenced() must be called as a trigger",
        )
        .detail("It is a trigger function.")
        .hint("SELECT fence_table('my_table', 'my-resource:{id}');"));
    };
    let answer = fire(&firing);
    answer.map_err(|mut refusal| {
        if let Some(write) = &mut refusal.about {
            write.set_relation(firing.relation());
        }
        refusal
    })
}

fn fire(firing: &Firing) -> Answer<Value> {
    let mut plan = match firing.take::<Plan>() {
        Some(plan) => plan,
        None => Box::new(Plan::make(firing)?),
    };
    let answer = if firing.event() == Event::Truncate {
        plan.truncate(firing)
    } else if plan.constant.is_some() {
        plan.fence_constant(firing)
    } else {
        plan.fence_template(firing)
    }?;
    firing.leave(plan);
    Ok(answer)
}

impl Plan {
    fn make(firing: &Firing) -> Answer<Plan> {
        api::check_preloaded()?;
        check_attachment(firing)?;
        let arguments = Arguments::read(&firing.arguments())?;
        let ledger = ledger::oid()?;
        let relation = firing.relation_name();
        if let Some(later) = firing.later_trigger() {
            return Err(not_the_last(&relation, &later));
        }
        let resources = &arguments.resources;
        let constant = match resources.constant() {
            Some(name) => Some(Resource::named(Some(name.into()))?),
            None => None,
        };
        let token_column = match &arguments.token_column {
            None => None,
            Some(name) => Some(checked_token_column(firing.relation(), &relation, name)?),
        };
        let mut parts = Vec::new();
        for piece in resources.template.pieces() {
            parts.push(match piece {
                Piece::Text(text) => Part::Text(resources.bytes(text)),
                // a TRUNCATE has no rows
                Piece::Column(_) if firing.event() == Event::Truncate => Part::Text(Vec::new()),
                Piece::Column(name) => {
                    let column = Column::prepare(firing, &resources.bytes(name))
                        .map_err(|error| column_refusal(name, &relation, error))?;
                    Part::Column(Box::new(column))
                }
            });
        }
        let mut plan = Plan {
            parts,
            constant,
            ledger,
            token_column,
            strict: arguments.strict,
            relation,
            passed: None,
            passed_values: Vec::new(),
            leaving: None,
            old_name: Vec::new(),
            new_name: Vec::new(),
        };
        if plan.may_skip_rows() && plan.has_one_plain_column() {
            plan.passed_values = vec![None; VALUES];
        }
        Ok(plan)
    }

    fn has_one_plain_column(&self) -> bool {
        let mut columns = self.parts.iter().filter_map(|part| match part {
            Part::Column(column) => Some(column.is_plain()),
            Part::Text(_) => None,
        });
        columns.next() == Some(true) && columns.next().is_none()
    }

    fn fence_constant(&mut self, firing: &Firing) -> Answer<Value> {
        if self.passed == Some(Passed::now()) {
            return Ok(firing.unchanged());
        }
        let Some(resource) = self.constant.as_ref() else {
            return Ok(firing.unchanged());
        };
        let token = self.pass(firing, resource)?;
        self.note_leaving(firing, token);
        if self.may_skip_rows() {
            self.passed = Some(Passed::now());
        }
        Ok(self.stamp(firing, token))
    }

    /// Not where a verdict must watch the clock, nor where rows present tokens or are stamped.
    fn may_skip_rows(&self) -> bool {
        !self.strict && self.token_column.is_none()
    }

    /// The value that alone tells the resource of a row, where it is the same in old and new row.
    fn plain_value(&self, firing: &Firing) -> Option<usize> {
        if self.passed_values.is_empty() {
            return None;
        }
        let column = self.parts.iter().find_map(|part| match part {
            Part::Column(column) => Some(column),
            Part::Text(_) => None,
        })?;
        match firing.event() {
            Event::Insert => column.value(firing, Side::New),
            Event::Update if !column.is_unchanged(firing) => None,
            _ => column.value(firing, Side::Old),
        }
    }

    fn fence_template(&mut self, firing: &Firing) -> Answer<Value> {
        let value = self.plain_value(firing);
        let place = value.map(|value| value % VALUES);
        let known = place.and_then(|place| self.passed_values.get(place).copied().flatten());
        if let (Some(value), Some((known, passed))) = (value, known)
            && value == known
            && passed == Passed::now()
        {
            return Ok(firing.unchanged());
        }
        let answer = self.fence_rendered(firing)?;
        if let (Some(value), Some(place)) = (value, place) {
            self.passed_values[place] = Some((value, Passed::now()));
        }
        Ok(answer)
    }

    fn fence_rendered(&mut self, firing: &Firing) -> Answer<Value> {
        let event = firing.event();
        let mut old = std::mem::take(&mut self.old_name);
        let mut new = std::mem::take(&mut self.new_name);
        let mut token = None;
        if event != Event::Insert {
            self.render(firing, Side::Old, &mut old)?;
        }
        let moves = match event {
            Event::Insert => {
                self.render(firing, Side::New, &mut new)?;
                true
            }
            Event::Update if !self.is_unchanged(firing) => {
                self.render(firing, Side::New, &mut new)?;
                new != old
            }
            _ => false,
        };
        if event != Event::Insert {
            let passed = self.pass_name(firing, &old)?;
            self.note_leaving(firing, passed);
            token = Some(passed);
        }
        if moves {
            token = Some(self.pass_name(firing, &new)?);
        }
        self.old_name = old;
        self.new_name = new;
        Ok(match token {
            Some(token) => self.stamp(firing, token),
            None => firing.unchanged(),
        })
    }

    /// The UPDATE of a row may be about to move it to another partition.
    fn note_leaving(&mut self, firing: &Firing, token: i64) {
        if self.token_column.is_some() && firing.event() == Event::Update {
            self.leaving = Some(Leaving {
                place: firing.old_place(),
                token,
            });
        }
    }

    fn is_unchanged(&self, firing: &Firing) -> bool {
        self.parts.iter().all(|part| match part {
            Part::Text(_) => true,
            Part::Column(column) => column.is_unchanged(firing),
        })
    }

    fn render(&self, firing: &Firing, side: Side, out: &mut Vec<u8>) -> Answer<()> {
        out.clear();
        for part in &self.parts {
            match part {
                Part::Text(text) => out.extend_from_slice(text),
                Part::Column(column) => {
                    if !column.render(firing, side, out) {
                        return Err(self.null_in_resource());
                    }
                }
            }
        }
        resources::check_name(out)
    }

    /// Passes the fence for a rendered resource; without allocation when the verdict holds already.
    fn pass_name(&self, firing: &Firing, name: &[u8]) -> Answer<i64> {
        let hash = name::hash(name);
        let held = xact::checked(hash, name, |checked| self.serves(firing, checked)).flatten();
        if let Some(token) = held {
            return Ok(token);
        }
        let resource = Resource {
            name: name.into(),
            hash,
            ledger: self.ledger,
        };
        self.pass(firing, &resource)
    }

    /// The token of a verdict that holds, if it answers what is presented now.
    fn serves(&self, firing: &Firing, checked: &Checked) -> Option<i64> {
        if !fence::still_good(checked, self.strict) {
            return None;
        }
        let setting = settings::presented();
        let presented = if checked.named {
            true
        } else if !setting.as_slice().is_empty() {
            setting.as_slice().contains(&checked.token)
        } else {
            self.column_token(firing) == Some(checked.token)
        };
        presented.then_some(checked.token)
    }

    fn pass(&self, firing: &Firing, resource: &Resource) -> Answer<i64> {
        if pg::in_recovery() {
            return Err(errors::on_standby("a fenced write"));
        }
        let (held, named) = xact::checked(resource.hash, &resource.name, |checked| {
            let named = checked.named.then_some(checked.token);
            (self.serves(firing, checked), named)
        })
        .unwrap_or_default();
        if let Some(token) = held {
            return Ok(token);
        }
        let setting = settings::presented();
        let single;
        let tokens = if let Some(token) = named {
            single = [token];
            single.as_slice()
        } else if !setting.as_slice().is_empty() {
            setting.as_slice()
        } else {
            let Some(token) = self.column_token(firing) else {
                return Err(fence::no_token(resource, &self.relation));
            };
            if token <= 0 {
                return Err(errors::token_not_positive(token));
            }
            single = [token];
            single.as_slice()
        };
        fence::pass(
            resource,
            Presented {
                tokens,
                named: named.is_some(),
                strict: self.strict,
            },
        )
    }

    /// What the row's token column presents.
    ///
    /// The columns that a MERGE sets are those of all its actions, so one that an action leaves alone
    /// is only told by its value.
    fn column_token(&self, firing: &Firing) -> Option<i64> {
        let column = self.token_column?;
        match firing.event() {
            Event::Insert => firing.i64(Side::New, column),
            Event::Update if firing.sets(column) => {
                let new = firing.i64(Side::New, column);
                let is_set = !pg::hooks::may_be_merge() || new != firing.i64(Side::Old, column);
                new.filter(|_| is_set)
            }
            Event::Delete => {
                let leaving = self.leaving.filter(|leaving| leaving.is(firing));
                leaving.map(|leaving| leaving.token)
            }
            Event::Update | Event::Truncate => None,
        }
    }

    fn stamp(&self, firing: &Firing, token: i64) -> Value {
        match (self.token_column, firing.event()) {
            (Some(column), Event::Insert | Event::Update)
                if firing.i64(Side::New, column) != Some(token) =>
            {
                firing.stamped(column, token)
            }
            _ => firing.unchanged(),
        }
    }

    fn truncate(&self, firing: &Firing) -> Answer<Value> {
        match &self.constant {
            Some(resource) => {
                self.pass(firing, resource)?;
                Ok(firing.unchanged())
            }
            None => Err(Refusal::new(
                code::FEATURE_NOT_SUPPORTED,
                format!("cannot TRUNCATE table {}", self.relation),
            )
            .detail("It is fenced row by row, and TRUNCATE does not look at rows.")
            .hint("Use DELETE, presenting a token for every resource, or take the fence off with unfence_table.")),
        }
    }

    fn null_in_resource(&self) -> Refusal {
        Refusal::new(
            code::NULL_NOT_ALLOWED,
            format!(
                "NULL in a column that names the resource of table {}",
                self.relation
            ),
        )
        .detail("A row belongs to the resource that its columns name.")
        .hint("Make the columns in the resource template NOT NULL.")
    }
}

/// A trigger that came after the fence could change what it has looked at.
fn not_the_last(relation: &str, later: &str) -> Refusal {
    Refusal::new(
        code::NOT_IN_PREREQUISITE_STATE,
        format!("the fence of table {relation} is not its last BEFORE trigger"),
    )
    .detail(format!(
        "Trigger \"{later}\" fires after it, and could move a row to another resource."
    ))
    .hint("Put the fence on again with fence_table, which gives it a name behind the others, or rename that trigger.")
}

fn check_attachment(firing: &Firing) -> Answer<()> {
    let is_row = firing.is_for_each_row();
    let is_truncate = firing.event() == Event::Truncate;
    if firing.is_before() && is_row != is_truncate {
        return Ok(());
    }
    Err(Refusal::new(
        code::TRIGGER_PROTOCOL,
        "fenced() must be a BEFORE trigger FOR EACH ROW, or BEFORE TRUNCATE",
    )
    .detail("Later or less often it could not keep a stale write out.")
    .hint("SELECT fence_table('my_table', 'my-resource:{id}');"))
}

impl Arguments {
    /// Reads the arguments of CREATE TRIGGER. 42601, 22023.
    pub fn read(arguments: &[Vec<u8>]) -> Answer<Arguments> {
        let Some((resource, further)) = arguments.split_first() else {
            return Err(
                Refusal::new(code::INVALID_PARAMETER, "fenced() needs a resource")
                    .detail("The trigger has no arguments.")
                    .hint("CREATE TRIGGER ... EXECUTE FUNCTION fenced('my-resource:{id}');"),
            );
        };
        let mut read = Arguments {
            resources: Resources::parse(resource)?,
            token_column: None,
            strict: false,
        };
        for argument in further {
            if argument == b"strict" {
                read.strict = true;
            } else if let Some(name) = argument.strip_prefix(b"token_column=") {
                read.token_column = Some(name.to_vec());
            } else {
                return Err(Refusal::new(
                    code::INVALID_PARAMETER,
                    format!(
                        "unknown argument \"{}\" of fenced()",
                        errors::shown(argument)
                    ),
                )
                .detail("After the resource it takes token_column=NAME and strict.")
                .hint("Use fence_table, which makes the trigger."));
            }
        }
        Ok(read)
    }
}

impl Resources {
    /// Reads a template. 42601; 22023 and 22001 for a constant that cannot be a name.
    pub fn parse(bytes: &[u8]) -> Answer<Resources> {
        if bytes.is_empty() {
            return Err(errors::empty_name("resource"));
        }
        let template = Template::parse(&as_text(bytes)).map_err(|error| {
            Refusal::new(code::SYNTAX_ERROR, error.to_string())
                .detail(format!("The template is \"{}\".", errors::shown(bytes)))
                .hint("Write {column} for a column's value, and {{ or }} for a literal brace.")
        })?;
        let read = Resources {
            template,
            is_utf8: std::str::from_utf8(bytes).is_ok(),
        };
        if let Some(constant) = read.constant() {
            resources::check_name(&constant)?;
        }
        Ok(read)
    }

    /// The resource, where it is the same for every row.
    pub fn constant(&self) -> Option<Vec<u8>> {
        self.template.constant().map(|text| self.bytes(text))
    }

    /// The columns, as often as they are named.
    pub fn columns(&self) -> Vec<Vec<u8>> {
        self.template
            .columns()
            .map(|name| self.bytes(name))
            .collect()
    }

    /// A piece in the server's encoding: the reverse of `as_text`.
    fn bytes(&self, text: &str) -> Vec<u8> {
        if self.is_utf8 {
            text.as_bytes().to_vec()
        } else {
            text.chars().map(|c| c as u8).collect()
        }
    }
}

/// Templates are parsed as text. Every server encoding keeps ASCII bytes for ASCII alone, so where the
/// bytes are not UTF-8 each can stand for the character of its number.
fn as_text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().map(|b| *b as char).collect(),
    }
}

/// The column that presents tokens. 42703, 42804.
pub fn checked_token_column(relation: Oid, name: &str, column: &[u8]) -> Answer<i16> {
    let shown = errors::shown(column);
    let Some((number, type_)) = trigger::column(relation, column) else {
        return Err(unknown_column(&shown, name));
    };
    if !trigger::is_bigint(type_) {
        return Err(Refusal::new(
            code::DATATYPE_MISMATCH,
            format!("token column \"{shown}\" of table {name} is not a bigint"),
        )
        .detail("Tokens are bigints.")
        .hint(format!(
            "ALTER TABLE {name} ALTER COLUMN \"{shown}\" TYPE bigint USING \"{shown}\"::bigint;"
        )));
    }
    if trigger::is_generated(relation, number) {
        return Err(Refusal::new(
            code::FEATURE_NOT_SUPPORTED,
            format!("token column \"{shown}\" of table {name} is generated"),
        )
        .detail("A generated column can neither present a token nor be stamped with one.")
        .hint("Use a plain bigint column."));
    }
    Ok(number)
}

/// Why a column cannot be in the resource. 42703, 0A000.
pub fn column_refusal(column: &str, relation: &str, error: ColumnError) -> Refusal {
    match error {
        ColumnError::Unknown => unknown_column(column, relation),
        ColumnError::Type(type_) => Refusal::new(
            code::FEATURE_NOT_SUPPORTED,
            format!("column \"{column}\" of type {type_} cannot be part of a resource"),
        )
        .detail("Its text depends on settings, or is not made for names.")
        .hint(format!("Use a generated text column: ALTER TABLE {relation} ADD COLUMN resource_key text GENERATED ALWAYS AS (<immutable expression>) STORED;")),
        ColumnError::Virtual => Refusal::new(
            code::FEATURE_NOT_SUPPORTED,
            format!("virtual generated column \"{column}\" cannot be part of a resource"),
        )
        .detail("It has no value in the row.")
        .hint("Use a generated text column that is STORED."),
    }
}

fn unknown_column(column: &str, relation: &str) -> Refusal {
    Refusal::new(
        code::UNDEFINED_COLUMN,
        format!("column \"{column}\" of table {relation} does not exist"),
    )
    .detail("The fence names it.")
    .hint(format!(
        "Name an existing column, or fence the table again: SELECT fence_table({}, '<resource>');",
        errors::literal(relation.as_bytes())
    ))
}
