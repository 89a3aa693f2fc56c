//! One run of pgbench, the yardstick that everybody can repeat: prepared statements, one script,
//! no vacuum. A run in which any transaction failed gives no figure, it is an error.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::Result;
use crate::cluster::Cluster;
use crate::contest::{Load, Variables};

/// A script that any number of clients runs over and over.
pub struct Script {
    path: PathBuf,
    settings: &'static str,
}

impl Script {
    /// Puts the script beside the cluster. No colon may stand in it but before a variable: pgbench
    /// looks for variables inside of quotes too.
    pub fn new(cluster: &Cluster, name: &str, text: &str) -> Result<Self> {
        let path = cluster.dir().join(name).with_extension("sql");
        std::fs::write(&path, text)?;
        Ok(Script { path, settings: "" })
    }

    /// Command-line options of the server, such as `-c name=value`, for the sessions that run it.
    pub fn with_settings(mut self, settings: &'static str) -> Self {
        self.settings = settings;
        self
    }
}

impl Load for Script {
    /// Transactions a second; a transaction is one pass through the script.
    fn rate(
        &self,
        cluster: &Cluster,
        clients: u32,
        seconds: u32,
        variables: &Variables,
    ) -> Result<f64> {
        let mut command = cluster.client_program("pgbench");
        command.env("PGOPTIONS", self.settings);
        command.args(["--no-vacuum", "--protocol=prepared"]);
        command.arg(format!("--client={clients}"));
        command.arg(format!("--jobs={}", clients.min(cores())));
        command.arg(format!("--time={seconds}"));
        for (name, value) in variables {
            command.arg(format!("--define={name}={value}"));
        }
        command.arg("--file").arg(&self.path).arg("postgres");
        let output = command.stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        match rate_in(&text) {
            Some(rate) if output.status.success() => Ok(rate),
            _ => Err(failure(&self.path, &text, &output.stderr)),
        }
    }
}

/// None where pgbench gave no rate or had failed transactions.
fn rate_in(output: &str) -> Option<f64> {
    let after = |label: &str| output.lines().find_map(|line| line.strip_prefix(label));
    let first = |rest: &'_ str| rest.split_whitespace().next().map(String::from);
    if first(after("number of failed transactions: ")?)? != "0" {
        return None;
    }
    first(after("tps = ")?)?.parse().ok()
}

fn failure(script: &Path, output: &str, errors: &[u8]) -> Box<dyn std::error::Error + Send + Sync> {
    let errors = String::from_utf8_lossy(errors);
    format!(
        "pgbench with {} failed\n{output}\n{errors}",
        script.display()
    )
    .into()
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
number of transactions actually processed: 7338
number of failed transactions: 0 (0.000%)
latency average = 0.272 ms
initial connection time = 1.838 ms
tps = 3672.108226 (without initial connection time)
";

    #[test]
    fn rate_is_read() {
        assert_eq!(rate_in(OUTPUT), Some(3672.108226));
    }

    #[test]
    fn no_rate_with_failed_transactions() {
        assert_eq!(
            rate_in(&OUTPUT.replace("transactions: 0 (0.000%)", "transactions: 1 (0.014%)")),
            None
        );
        assert_eq!(rate_in("pgbench: error"), None);
    }
}
