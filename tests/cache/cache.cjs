// Runs the cases, one after the other, each against servers of its own:
//   node cache.cjs --binary FATHOM --work FOLDER [--lane default|long] [--only NAME]
//                  [--small-disk FOLDER: a file system that is soon full]
// What must be so is checked without stopping at the first failure; the exit status is 1 when
// anything was wrong.
'use strict';
const fs = require('fs');
const path = require('path');
const {Server, pause} = require('./server.cjs');
const {Texts} = require('./texts.cjs');

const options = {binary: '', work: '', lane: 'default', only: '', 'small-disk': ''};
for (let i = 2; i < process.argv.length; i += 2) {
  const name = process.argv[i].replace(/^--/, '');
  if (!(name in options)) throw new Error(`unknown option ${process.argv[i]}`);
  options[name] = process.argv[i + 1];
}
if (!['default', 'long'].includes(options.lane)) throw new Error(`no lane ${options.lane}`);

// What a case works with.
class Case {
  constructor(name, shared) {
    this.name = name;
    this.shared = shared;
    this.failures = 0;
    this.servers = [];
    this.long = options.lane === 'long';
    this.binary = options.binary;
    this.smallDisk = options['small-disk'];
  }

  note(text) {
    console.log(`    ${text}`);
  }
  check(right, text) {
    if (right) return true;
    ++this.failures;
    console.log(`    WRONG: ${text}`);
    return false;
  }

  async serve(...flags) {
    const server = await Server.start(options.binary, flags);
    this.servers.push(server);
    return server;
  }
  // Without a prefix cache; kept for all cases, as is what it said.
  async cold() {
    this.shared.cold ??= await Server.start(
        options.binary,
        ['--no-enable-prefix-caching', '--max-model-len', '262144', '--max-num-seqs', '64']);
    return this.shared.cold;
  }
  async texts() {
    this.shared.texts ??= await Texts.make(await this.cold());
    return this.shared.texts;
  }
  folder(name) {
    const folder = path.join(options.work, `${this.name.split(':')[0]}-${name}`);
    fs.mkdirSync(folder, {recursive: true});
    return folder;
  }

  // What a server without a prefix cache answers; asked once.
  async right(request) {
    const {fathom, cache_salt, ...plain} = request;
    const key = JSON.stringify(plain);
    if (!this.shared.right.has(key)) {
      this.shared.right.set(key, await (await this.cold()).ask(plain));
    }
    return this.shared.right.get(key);
  }

  // The reply agrees with the cold one, to the last bit of the log-probabilities.
  async same(request, reply, what) {
    const right = await this.right(request);
    if (reply.text !== right.text) {
      return this.check(
          false,
          `${what}: got ${JSON.stringify(reply.text)}, cold ` +
              `${JSON.stringify(right.text)}; ${this.found(reply)}`);
    }
    const at = right.logprobs.findIndex((value, i) => value !== reply.logprobs[i]);
    return this.check(
        at < 0 && reply.logprobs.length === right.logprobs.length,
        `${what}: the text is right, but log-probability ${at} is ` +
            `${reply.logprobs[at]}, cold ${right.logprobs[at]}; ${this.found(reply)}`);
  }

  // What usage and explain say agrees with itself. Every reply of a case passes through here.
  account(reply, what) {
    const {usage, report} = reply;
    const sources = report.tokens_by_source;
    const held = sources.device + sources.host + sources.disk;
    this.check(
        usage.prompt_cache_hit_tokens === reply.cached && report.boundary === reply.cached &&
            held === reply.cached,
        `${what}: cached_tokens ${reply.cached}, prompt_cache_hit_tokens ` +
            `${usage.prompt_cache_hit_tokens}, boundary ${report.boundary}, by source ` +
            JSON.stringify(sources));
    this.check(
        usage.prompt_cache_miss_tokens === usage.prompt_tokens - reply.cached &&
            sources.computed === usage.prompt_tokens - reply.cached,
        `${what}: ${usage.prompt_tokens} prompt tokens, ${reply.cached} cached, ` +
            `prompt_cache_miss_tokens ${usage.prompt_cache_miss_tokens}, ` +
            `computed ${sources.computed}`);
    this.check(
        report.tokens_matched >= report.boundary,
        `${what}: matched ${report.tokens_matched} tokens, went on from ${report.boundary}`);
    return reply;
  }
  async ask(server, request, what, how) {
    return this.account(await server.ask(request, how), what);
  }

  found(reply) {
    const {report, usage} = reply;
    return `${reply.cached} of ${usage.prompt_tokens} found, ` +
        `${report.tokens_matched} matched, ${report.reason}`;
  }

  // Nothing runs, and every unit is back.
  async returned(server, what) {
    let m;
    for (let i = 0; i < 600; ++i) {
      m = await server.metrics();
      if (m.running + m.waiting + m.blocks.used + m.slots.used === 0) return true;
      await pause(100);
    }
    return this.check(false, `${what}: units not returned: ${JSON.stringify(m)}`);
  }

  async end() {
    for (const server of this.servers) {
      if (server.child.exitCode !== null || server.child.signalCode !== null) continue;
      this.check(
          await server.stop(), `the server did not end with status 0:\n${server.log.slice(-2000)}`);
    }
  }
}

async function main() {
  const cases = {
    ...require('./reuse_cases.cjs'),
    ...require('./load_cases.cjs'),
    ...require('./tier_cases.cjs')
  };
  const shared = {right: new Map()};
  const wrong = [];
  let ran = 0;
  // What a case that failed has left behind.
  process.on('unhandledRejection', (error) => {
    console.log(`    WRONG: ${error.stack}`);
    wrong.push('a request that nobody waited for');
  });
  for (const [name, body] of Object.entries(cases)) {
    if (!name.toLowerCase().includes(options.only.toLowerCase())) continue;
    ++ran;
    const began = performance.now();
    console.log(name);
    const test = new Case(name, shared);
    try {
      await body(test);
      await test.end();
    } catch (error) {
      test.check(false, error.stack + (error.cause ? `\n    ${error.cause}` : ''));
      for (const server of test.servers) {
        console.log(`    log: ${server.log.slice(-1500)}`);
        await server.kill();
      }
      if (shared.cold?.child.exitCode !== null) delete shared.cold;
    }
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    console.log(`  ${test.failures === 0 ? 'right' : 'WRONG'}, ${seconds} s`);
    if (test.failures > 0) wrong.push(name);
  }
  if (shared.cold) await shared.cold.stop();
  console.log(wrong.length === 0 ? `all ${ran} cases right` : `wrong: ${wrong.join('; ')}`);
  process.exit(wrong.length === 0 && ran > 0 ? 0 : 1);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
