//! How busy an engine says that it is, read from its metrics page. Pure: the page and the time are passed in.

use serde::Serialize;
use tokio::time::Instant;

/// One reading of an engine's metrics page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EngineLoad {
    /// Requests that the engine works on.
    pub(crate) running: u64,
    /// Requests that wait in the engine.
    pub(crate) waiting: u64,
    /// The part of its KV blocks that is in use, the mean over the engines of the page.
    pub(crate) kv_usage: Option<f64>,
    /// The part of prompt tokens that its prefix cache had, between the last two readings in which there
    /// were any.
    pub(crate) cached_token_rate: Option<f64>,
    /// How many tokens its KV blocks hold, the least of the engines of the page.
    pub(crate) capacity: Option<u64>,
    /// Prompt tokens that were looked up and found since the engine started.
    cached: [f64; 2],
    /// Requests of this router among them.
    pub(crate) ours: u64,
    /// When it was read.
    pub(crate) at: Instant,
}

/// A peer's load as operators see it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct EngineLoadView {
    /// Requests that the engine works on.
    pub running: u64,
    /// Requests that wait in the engine.
    pub waiting: u64,
    /// The part of its KV blocks that is in use.
    pub kv_usage: Option<f64>,
    /// The part of prompt tokens that its prefix cache had of late.
    pub cached_token_rate: Option<f64>,
    /// How old these figures are.
    pub age_seconds: f64,
}

impl EngineLoad {
    /// Reads a page, of one data-parallel rank only if told; none where it tells nothing of load.
    pub(crate) fn read(page: &str, rank: Option<u32>, before: Option<&Self>, at: Instant) -> Option<Self> {
        let of_rank = rank.map(|rank| format!("engine=\"{rank}\""));
        let (mut running, mut waiting) = (None, 0.0);
        let (mut usage, mut former_usage) = (Mean::default(), Mean::default());
        let mut cached = [0.0; 2];
        let mut capacity: Option<u64> = None;
        for line in page.lines() {
            let Some((series, value)) = line.strip_prefix("vllm:").and_then(|line| line.rsplit_once(' '))
            else {
                continue;
            };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let Ok(value) = value.parse::<f64>() else { continue };
            let is_others = of_rank.as_ref().is_some_and(|rank| !labels.contains(rank.as_str()));
            if is_others || !value.is_finite() {
                continue;
            }
            match name {
                "num_requests_running" => running = Some(running.unwrap_or(0.0) + value),
                "num_requests_waiting" => waiting += value,
                "kv_cache_usage_perc" => usage.add(value),
                "gpu_cache_usage_perc" => former_usage.add(value),
                "prefix_cache_queries_total" => cached[0] += value,
                "prefix_cache_hits_total" => cached[1] += value,
                "cache_config_info" => {
                    capacity = capacity.into_iter().chain(tokens_of_cache(labels)).min();
                }
                _ => {}
            }
        }
        let kv_usage = usage.value().or(former_usage.value());
        Some(Self {
            running: running? as u64,
            waiting: waiting as u64,
            kv_usage: kv_usage.map(|usage| usage.clamp(0.0, 1.0)),
            cached_token_rate: cached_rate(cached, before),
            capacity,
            cached,
            ours: 0,
            at,
        })
    }

    pub(crate) fn view(&self) -> EngineLoadView {
        EngineLoadView {
            running: self.running,
            waiting: self.waiting,
            kv_usage: self.kv_usage,
            cached_token_rate: self.cached_token_rate,
            age_seconds: self.at.elapsed().as_secs_f64(),
        }
    }
}

/// How many tokens fit into an engine's KV blocks; engines before 0.30 tell the blocks only.
fn tokens_of_cache(labels: &str) -> Option<u64> {
    let number = |name: &str| {
        let label = labels.split(',').find_map(|label| label.strip_prefix(name)?.strip_prefix("=\""))?;
        label.split_once('"')?.0.parse::<u64>().ok()
    };
    let of_blocks = || number("num_gpu_blocks")?.checked_mul(number("block_size")?);
    number("kv_cache_size_tokens").or_else(of_blocks).filter(|tokens| *tokens > 0)
}

fn cached_rate(now: [f64; 2], before: Option<&EngineLoad>) -> Option<f64> {
    // Counters that went back are of an engine that has begun anew.
    let since = before.map(|before| before.cached).filter(|since| since[0] <= now[0] && since[1] <= now[1]);
    let [queries, hits] = since.map_or(now, |since| [now[0] - since[0], now[1] - since[1]]);
    if queries > 0.0 {
        return Some((hits / queries).clamp(0.0, 1.0));
    }
    since.and(before).and_then(|before| before.cached_token_rate)
}

#[derive(Default)]
struct Mean {
    sum: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    fn value(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(page: &str, rank: Option<u32>, before: Option<&EngineLoad>) -> Option<EngineLoad> {
        EngineLoad::read(page, rank, before, Instant::now())
    }

    fn cached(queries: u32, hits: u32) -> String {
        format!(
            "vllm:num_requests_running 1\nvllm:prefix_cache_queries_total{{engine=\"0\"}} {queries}\n\
             vllm:prefix_cache_hits_total{{engine=\"0\"}} {hits}\n"
        )
    }

    #[tokio::test]
    async fn a_real_page_is_read() {
        let load =
            read(include_str!("../../../../tests/fixtures/captures/metrics_D.txt"), None, None).unwrap();
        assert_eq!((load.running, load.waiting, load.kv_usage), (0, 0, Some(0.0)));
        assert_eq!(load.capacity, Some(524_288));
    }

    #[tokio::test]
    async fn ranks_are_added_up_or_told_apart() {
        let page = "# HELP vllm:num_requests_running 7\n\
                    vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
                    vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 1.0\n\
                    vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} 2.0\n\
                    vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.5\n\
                    vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"m\"} 0.25\n";
        let both = read(page, None, None).unwrap();
        assert_eq!((both.running, both.waiting, both.kv_usage), (4, 2, Some(0.375)));
        let second = read(page, Some(1), None).unwrap();
        assert_eq!((second.running, second.waiting, second.kv_usage), (1, 2, Some(0.25)));
        assert_eq!(read(page, Some(2), None), None);
        assert_eq!(read("process_cpu_seconds_total 1\n", None, None), None);
    }

    #[tokio::test]
    async fn the_cache_of_the_smallest_rank_counts() {
        let page = "vllm:num_requests_running{engine=\"0\"} 0\n\
                    vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n\
                    vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"90\"} 1.0\n";
        assert_eq!(read(page, None, None).unwrap().capacity, Some(1440));
        assert_eq!(read(page, Some(0), None).unwrap().capacity, Some(1600));
        let unknown = page.replace("100", "None").replace("90", "None");
        assert_eq!(read(&unknown, None, None).unwrap().capacity, None);
    }

    #[tokio::test]
    async fn the_cached_part_is_of_what_came_between_two_readings() {
        let first = read(&cached(100, 50), None, None).unwrap();
        assert_eq!(first.cached_token_rate, Some(0.5));
        let second = read(&cached(200, 60), None, Some(&first)).unwrap();
        assert_eq!(second.cached_token_rate, Some(0.1));
        let idle = read(&cached(200, 60), None, Some(&second)).unwrap();
        assert_eq!(idle.cached_token_rate, Some(0.1), "nothing new is known");
        let restarted = read(&cached(10, 10), None, Some(&idle)).unwrap();
        assert_eq!(restarted.cached_token_rate, Some(1.0));
        let empty = read(&cached(0, 0), None, Some(&idle)).unwrap();
        assert_eq!(empty.cached_token_rate, None);
    }
}
