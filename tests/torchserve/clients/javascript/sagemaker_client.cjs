// Uses AWS's client for JavaScript as a user does: sagemaker_client.cjs RUNTIME_URL PICTURE (a data URL).
// Prints the results as one line of JSON.
const runtime = require("@aws-sdk/client-sagemaker-runtime");

const [, , address, picture] = process.argv;
const client = new runtime.SageMakerRuntimeClient({
  endpoint: address,
  region: "us-east-1",
  credentials: { accessKeyId: "any", secretAccessKey: "any" },
  maxAttempts: 1,
});
const request = (body, members) => ({
  ...{ EndpointName: "llava", ContentType: "application/json", Body: JSON.stringify(body) },
  ...members,
});
const decode = (bytes) => new TextDecoder().decode(bytes);

const invoke = (body, members) => client.send(new runtime.InvokeEndpointCommand(request(body, members)));

async function stream(body, members) {
  const command = new runtime.InvokeEndpointWithResponseStreamCommand(request(body, members));
  const parts = [];
  for await (const event of (await client.send(command)).Body) parts.push(decode(event.PayloadPart.Bytes));
  return parts;
}

async function refusal(call) {
  try {
    await call();
  } catch (error) {
    const is_own = error instanceof (runtime[error.name] ?? Array);
    return [error.name, is_own, error.$metadata.httpStatusCode, error.OriginalStatusCode ?? null];
  }
}

(async () => {
  const opened = await invoke({ requestType: "NEW_SESSION", path: picture }, { SessionId: "NEW_SESSION" });
  const session = { SessionId: opened.NewSessionId.split(";")[0] };
  const ask = { type: "send_text_prompt", prompt_text: "What color is the circle?" };
  const asked = JSON.parse(decode((await invoke(ask, session)).Body));
  const pieces = await stream({ ...ask, stream: true }, session);
  const events = await stream({ messages: [{ role: "user", content: "Hello" }], stream: true });
  const closed = await invoke({ requestType: "CLOSE" }, session);
  const queued = await client.send(
    new runtime.InvokeEndpointAsyncCommand(request({ messages: [{ role: "user", content: "Hello" }] })),
  );
  const told = {
    session: session.SessionId,
    body: JSON.parse(decode(opened.Body)),
    asked,
    pieces,
    events,
    closed: closed.ClosedSessionId,
    queued: [queued.$metadata.httpStatusCode, queued.OutputLocation.split(":")[0]],
    after: await refusal(() => invoke(ask, session)),
    stream_after: await refusal(() => stream({ ...ask, stream: true }, session)),
    model: await refusal(() => invoke({ inputs: 3 })),
    target: await refusal(() => invoke(ask, { TargetModel: "other.tar.gz" })),
  };
  console.log(JSON.stringify(told));
})();
