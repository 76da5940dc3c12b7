// pg-boss as a contestant, in the drain only: benchmarks/contestants.py says what each command does.
// Its handler is given whole batches of 500, which it fetches without a pause while they come back full.
const { PgBoss } = require("pg-boss");

const { PGHOST: host, PGPORT: port, PGUSER: user, PGDATABASE: database } = process.env;
const boss = new PgBoss({ host, port: Number(port), user, database, supervise: false, schedule: false });
const AT_ONCE = 5000;

async function install() {
  await boss.createQueue("noop");
}

async function fill(count) {
  for (let first = 0; first < count; first += AT_ONCE) {
    const jobs = Array.from({ length: Math.min(AT_ONCE, count - first) }, () => ({ data: { padding: ".".repeat(200) } }));
    await boss.insert("noop", jobs);
  }
}

async function drain(step) {
  let count = 0;
  const options = { batchSize: 500, localConcurrency: 2, pollingIntervalSeconds: 0.5, burstWhenBatchFull: true };
  await boss.work("noop", options, async (jobs) => {
    for (const _ of jobs) if (count++ % step === 0) process.stdout.write(`${process.pid}\n`);
  });
  await new Promise(() => {});
}

const [command, ...rest] = process.argv.slice(2);
boss
  .start()
  .then(() => ({ install, fill, drain })[command](...rest.map(Number)))
  .then(() => boss.stop({ graceful: false }))
  .then(() => process.exit());
process.on("SIGTERM", () => process.exit());
