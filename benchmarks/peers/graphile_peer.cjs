// graphile-worker as a contestant: benchmarks/contestants.py says what each command does.
// A local queue of 500 and batched completion, as its own documentation advises for throughput.
const { Logger, run, runMigrations } = require("graphile-worker");
const { Pool } = require("pg");

const pgPool = new Pool({ max: 25 }); // node-postgres reads PGHOST and the others
pgPool.on("error", () => {}); // when the database is dropped
pgPool.on("connect", (client) => client.on("error", () => {}));
const logger = new Logger(() => () => {}); // its own would write among our lines
const batched = {
  localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
};
const seconds = () => Number(process.hrtime.bigint()) / 1e9; // Python's time.monotonic
const print = (text) => process.stdout.write(`${text}\n`);
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function fill(count) {
  await pgPool.query(
    `SELECT count(*) FROM graphile_worker.add_jobs((SELECT array_agg((
       'noop', json_build_object('number', n, 'padding', repeat('.', 200)), NULL, NULL, NULL, NULL, NULL, NULL
     )::graphile_worker.job_spec) FROM generate_series(1, $1) AS n))`,
    [count],
  );
}

async function work(noop, settings) {
  const preset = { worker: { concurrentJobs: 24, ...settings } };
  const runner = await run({ preset, pgPool, logger, taskList: { noop }, parsedCronItems: [] });
  await runner.promise;
}

async function drain(step) {
  let count = 0;
  await work(() => {
    if (count++ % step === 0) print(process.pid);
  }, batched);
}

async function produce(count, first, least, most) {
  for (let number = first; number < first + count; number++) {
    await pgPool.query("SELECT graphile_worker.add_job('noop', json_build_object('number', $1::int))", [number]);
    print(`commit ${number} ${seconds()}`);
    await pause(least + Math.random() * (most - least));
  }
}

const commands = {
  install: () => runMigrations({ pgPool, logger }),
  fill,
  drain,
  work: () => work(({ number }) => print(`start ${number} ${seconds()}`), {}),
  produce,
};
const [command, ...rest] = process.argv.slice(2);
commands[command](...rest.map(Number)).then(() => pgPool.end());
