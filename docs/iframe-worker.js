// Browsers start no worker from a page that was opened as a file. There this one takes its place, which runs the script of the search
// in a hidden frame. (Material's offline plugin would load such a script from a server, unless one with this name is in mkdocs.yml.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      this.started = new Promise((resolve) => {
        frame.onload = () => {
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          resolve(frame.contentWindow);
        };
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.started.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
